"""The cost model: from counts to time, measured on a machine or stated in a linear form."""

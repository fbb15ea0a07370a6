"""Tables of other tools, computed on replay's core to be compared with theirs."""

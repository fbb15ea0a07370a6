"""Reading logs, once for fits, replay, ladder, tune and report.

    log = open_log(traces)                 # of a trace set: `DenseLog` or `LiveLog`
    for chunk in log.chunks():             # whole requests as flat arrays, `tree_log.LogChunk`
        ...

What stands on top of the chunks:

- `logged_draft`: the runtime's own growth of a tree, fed from the log at any of its positions.
- `node_sample`: nodes with features and labels, for fits of a node scorer.
- `node_table`: every node of a chunk as plain columns, for the ladder and the report.
- `round_table`: the `rounds` rows of a set as arrays, for the report.

Null labels are *unknown*, never rejected.
"""

"""Reading logs, for fits, replay, ladder, tune and report.

    log = open_log(traces)                 # of a trace set: `DenseLog` or `LiveLog`
    for chunk in log.chunks():             # whole requests as flat arrays, `tree_log.LogChunk`
        ...

On top of the chunks:

- `logged_draft`: the runtime's own growth of a tree, fed from the log at any of its positions.
- `node_sample`: nodes with features and labels, for fits of a node scorer.
- `node_table`: every node of a chunk as plain columns, for the ladder.

Null labels are *unknown*.
"""

"""Dense collection: the full draft tree at every output position (design.md, section 1).

    text ─► target reads it once ─► D batched draft levels over all positions ─► labels ─► rows

Under lossless verification the text does not depend on the policy, so such a log shows what any
policy would have done at any position.
"""

from specctl.collect.dense.collection import DenseSummary, collect_dense

__all__ = ["DenseSummary", "collect_dense"]

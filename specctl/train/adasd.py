"""`fit adasd`: the clip of AdaSD's acceptance (arXiv:2512.11280), certified.

The acceptance's threshold follows the request, blind to whether what it admits is right; the clip
bounds it.
"""

from __future__ import annotations

from specctl.train.certify import Face

ADASD = Face(
    kind="adasd",
    title="AdaSD",
    what="Accepts a token where drafter and target are closer than a threshold that each request "
    "learns from the tokens that were accepted and rejected in its earlier rounds "
    "(arXiv:2512.11280).",
    setting="clip",
    limits=(
        "The acceptance looks at distributions, never at right or wrong; only the clip is "
        "certified, for checkable answers to such prompts, under this shape and this decoding. "
        "Fit again for another shape, pair or load.",
        "Answers that change without an answer key, such as prose, are not judged.",
    ),
)

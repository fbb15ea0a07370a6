"""Self-test vectors: made-up cases that travel with a policy, and what it decided on them.

`rows` asks what was learned, at its thresholds and beside them; `rounds` has the whole policy
draft, submit, share and accept. The policy's own code decides both, when an artifact is written
and when it is loaded; `verify` compares.
"""

from specctl.artifacts.selftest.verify import check_selftest, selftest_bytes

__all__ = ["check_selftest", "selftest_bytes"]

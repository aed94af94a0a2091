"""`import acl` on a machine without CANN: the NPU simulator (see npuserve/testing/simulator)."""

import sys

from npuserve.testing.simulator.module import fill

fill(sys.modules[__name__])

"""`python -m npuserve` is the command `npuserve`."""

import sys

from npuserve.cli import main

sys.exit(main())

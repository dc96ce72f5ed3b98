"""Two test processes share two cores: with more than one thread each, they wait for each other."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported; the scripts that tests start get it

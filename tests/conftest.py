import os
import subprocess

# Two test processes share two cores: with more than one thread each, they wait for each other.
os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported; the scripts that tests start get it

from warm import Warm

subprocess.Popen = Warm

import os
import signal
import subprocess

# Two test processes share two cores: with more than one thread each, they wait for each other.
os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported; the scripts that tests start get it

from warm import Warm

subprocess.Popen = Warm

# A shell's background job ignores Ctrl-C, and so would the processes that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

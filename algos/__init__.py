import sys

if sys.platform == "win32":  # no fork server, no file locks, other signals
    sys.exit("CraneRL runs on Linux and macOS; on Windows use it in WSL")

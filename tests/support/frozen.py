"""Last module that a fork server loads, see `forked.PRELOADED`."""

from tests.support import read_once
from tests.support.forked import freeze

read_once.read()
freeze()

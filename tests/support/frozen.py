"""Last module that a fork server loads, see `forked.PRELOADED`."""

from tests.support.forked import freeze

freeze()

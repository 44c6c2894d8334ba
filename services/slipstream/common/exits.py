"""How a process ends, in numbers and in one line: what whoever started it can tell from its exit code.

| code | what it says | whether a new start may help |
|---|---|---|
| 0 | it was asked to end, or had nothing left to do | |
| 1 | it failed, or something that it waited for did not come | yes |
| 2 | its configuration, or something it reads, cannot be used | no: it would end the same |
"""

from __future__ import annotations

import errno
import sys
from typing import NoReturn

from slipstream.common.config_errors import ConfigError

FAILED = 1
REFUSED = 2


class ServiceFailed(Exception):
    """A service cannot go on, which another start may mend; the process exits with `FAILED`."""


def end(code: int, sentence: str) -> NoReturn:
    """Exit with one line on standard error."""
    print(f"error: {sentence}", file=sys.stderr, flush=True)
    sys.exit(code)


def cannot_listen(what: str, error: OSError) -> ServiceFailed | ConfigError:
    """What to raise where a port cannot be listened on. One that another program has may be free again."""
    sentence = f"cannot {what}: {(error.strerror or str(error)).lower()}"
    return ServiceFailed(sentence) if error.errno == errno.EADDRINUSE else ConfigError(sentence)

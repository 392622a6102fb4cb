"""Two hosts on one machine, joined by a link that behaves as a profile says. Standard library only.

With `deploy/` on `sys.path`: `from netlab import Link, load_profiles`.
"""

from netlab.errors import LinkError
from netlab.link import Link
from netlab.profiles import Profile, load_profiles, parse_profile

__all__ = ["Link", "LinkError", "Profile", "load_profiles", "parse_profile"]

"""Makes the third kind known where it is imported, which is before the flags are."""

from instep.engines.kind import register
from tests.engines.third_kind import ThirdKind

register(ThirdKind())

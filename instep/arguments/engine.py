"""The flags of engines and of the weight sync."""

from instep.arguments.flag import read_flags
from instep.engines.kind import AUTO, kind_names
from instep.weights.way import AUTO as AUTO_WAY
from instep.weights.way import WAYS

ENGINE = read_flags(__file__, kinds=(AUTO, *kind_names()), ways=(AUTO_WAY, *WAYS))

from .dialect import DIALECTS as DIALECTS
from .dialect import DialectModule as DialectModule
from .dialect import count_tokens as count_tokens
from .dialect import models as models
from .responses import continued as continued

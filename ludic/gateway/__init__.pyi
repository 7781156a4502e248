from .calls import Answer as Answer
from .calls import Backend as Backend
from .calls import Caller as Caller
from .calls import CallRequest as CallRequest
from .calls import RefusedCallError as RefusedCallError
from .calls import Sampled as Sampled
from .calls import StoredCall as StoredCall

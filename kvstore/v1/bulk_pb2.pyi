from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class OpenBulkRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class OpenBulkReply(_message.Message):
    __slots__ = ("port", "token", "expires_ms")
    PORT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_MS_FIELD_NUMBER: _ClassVar[int]
    port: int
    token: bytes
    expires_ms: int
    def __init__(self, port: _Optional[int] = ..., token: _Optional[bytes] = ..., expires_ms: _Optional[int] = ...) -> None: ...

class SettleRequest(_message.Message):
    __slots__ = ("ticket",)
    TICKET_FIELD_NUMBER: _ClassVar[int]
    ticket: int
    def __init__(self, ticket: _Optional[int] = ...) -> None: ...

class SettleReply(_message.Message):
    __slots__ = ("known", "stored", "present", "refused")
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    known: bool
    stored: int
    present: int
    refused: int
    def __init__(self, known: bool = ..., stored: _Optional[int] = ..., present: _Optional[int] = ..., refused: _Optional[int] = ...) -> None: ...

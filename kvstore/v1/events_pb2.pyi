from kvstore.v1 import cache_pb2 as _cache_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PageChange(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PAGE_CHANGE_UNKNOWN: _ClassVar[PageChange]
    PAGE_CHANGE_STORED: _ClassVar[PageChange]
    PAGE_CHANGE_REMOVED: _ClassVar[PageChange]
PAGE_CHANGE_UNKNOWN: PageChange
PAGE_CHANGE_STORED: PageChange
PAGE_CHANGE_REMOVED: PageChange

class WatchRequest(_message.Message):
    __slots__ = ("fingerprints",)
    FINGERPRINTS_FIELD_NUMBER: _ClassVar[int]
    fingerprints: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, fingerprints: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Watched(_message.Message):
    __slots__ = ("time", "start", "complete", "events")
    TIME_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    time: float
    start: WatchStart
    complete: WatchComplete
    events: PageEvents
    def __init__(self, time: _Optional[float] = ..., start: _Optional[_Union[WatchStart, _Mapping]] = ..., complete: _Optional[_Union[WatchComplete, _Mapping]] = ..., events: _Optional[_Union[PageEvents, _Mapping]] = ...) -> None: ...

class WatchStart(_message.Message):
    __slots__ = ("instance", "missed")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    MISSED_FIELD_NUMBER: _ClassVar[int]
    instance: int
    missed: int
    def __init__(self, instance: _Optional[int] = ..., missed: _Optional[int] = ...) -> None: ...

class WatchComplete(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PageEvents(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[PageEvent]
    def __init__(self, events: _Optional[_Iterable[_Union[PageEvent, _Mapping]]] = ...) -> None: ...

class PageEvent(_message.Message):
    __slots__ = ("change", "tier", "fingerprint", "hashes", "parent")
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    change: PageChange
    tier: _cache_pb2.PageTier
    fingerprint: bytes
    hashes: bytes
    parent: bytes
    def __init__(self, change: _Optional[_Union[PageChange, str]] = ..., tier: _Optional[_Union[_cache_pb2.PageTier, str]] = ..., fingerprint: _Optional[bytes] = ..., hashes: _Optional[bytes] = ..., parent: _Optional[bytes] = ...) -> None: ...

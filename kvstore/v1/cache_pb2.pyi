from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PageTier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PAGE_TIER_ABSENT: _ClassVar[PageTier]
    PAGE_TIER_ARENA: _ClassVar[PageTier]
    PAGE_TIER_DISK: _ClassVar[PageTier]
    PAGE_TIER_REDIS: _ClassVar[PageTier]
    PAGE_TIER_OBJECTS: _ClassVar[PageTier]

class PageAbsence(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PAGE_ABSENCE_NONE: _ClassVar[PageAbsence]
    PAGE_ABSENCE_UNKNOWN: _ClassVar[PageAbsence]
    PAGE_ABSENCE_EVICTED: _ClassVar[PageAbsence]

class StoreOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STORE_OUTCOME_RESERVED: _ClassVar[StoreOutcome]
    STORE_OUTCOME_PRESENT: _ClassVar[StoreOutcome]
    STORE_OUTCOME_REFUSED: _ClassVar[StoreOutcome]

class TierState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_STATE_UNKNOWN: _ClassVar[TierState]
    TIER_STATE_OK: _ClassVar[TierState]
    TIER_STATE_DEGRADED: _ClassVar[TierState]
    TIER_STATE_DOWN: _ClassVar[TierState]
PAGE_TIER_ABSENT: PageTier
PAGE_TIER_ARENA: PageTier
PAGE_TIER_DISK: PageTier
PAGE_TIER_REDIS: PageTier
PAGE_TIER_OBJECTS: PageTier
PAGE_ABSENCE_NONE: PageAbsence
PAGE_ABSENCE_UNKNOWN: PageAbsence
PAGE_ABSENCE_EVICTED: PageAbsence
STORE_OUTCOME_RESERVED: StoreOutcome
STORE_OUTCOME_PRESENT: StoreOutcome
STORE_OUTCOME_REFUSED: StoreOutcome
TIER_STATE_UNKNOWN: TierState
TIER_STATE_OK: TierState
TIER_STATE_DEGRADED: TierState
TIER_STATE_DOWN: TierState

class AttachRequest(_message.Message):
    __slots__ = ("lock_name", "name")
    LOCK_NAME_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    lock_name: str
    name: str
    def __init__(self, lock_name: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class AttachReply(_message.Message):
    __slots__ = ("instance", "client")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    instance: int
    client: int
    def __init__(self, instance: _Optional[int] = ..., client: _Optional[int] = ...) -> None: ...

class OpenNamespaceRequest(_message.Message):
    __slots__ = ("layout", "durability", "label")
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    layout: str
    durability: str
    label: str
    def __init__(self, layout: _Optional[str] = ..., durability: _Optional[str] = ..., label: _Optional[str] = ...) -> None: ...

class OpenNamespaceReply(_message.Message):
    __slots__ = ("fingerprint", "batch_pages", "arena_directory", "number", "edition", "arena_beside_socket")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    BATCH_PAGES_FIELD_NUMBER: _ClassVar[int]
    ARENA_DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    EDITION_FIELD_NUMBER: _ClassVar[int]
    ARENA_BESIDE_SOCKET_FIELD_NUMBER: _ClassVar[int]
    fingerprint: bytes
    batch_pages: int
    arena_directory: str
    number: int
    edition: int
    arena_beside_socket: str
    def __init__(self, fingerprint: _Optional[bytes] = ..., batch_pages: _Optional[int] = ..., arena_directory: _Optional[str] = ..., number: _Optional[int] = ..., edition: _Optional[int] = ..., arena_beside_socket: _Optional[str] = ...) -> None: ...

class PageList(_message.Message):
    __slots__ = ("fingerprint", "hashes", "pinned", "newest_tier")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    NEWEST_TIER_FIELD_NUMBER: _ClassVar[int]
    fingerprint: bytes
    hashes: bytes
    pinned: bool
    newest_tier: int
    def __init__(self, fingerprint: _Optional[bytes] = ..., hashes: _Optional[bytes] = ..., pinned: bool = ..., newest_tier: _Optional[int] = ...) -> None: ...

class PageUse(_message.Message):
    __slots__ = ("fingerprint", "hashes", "read", "missed")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    READ_FIELD_NUMBER: _ClassVar[int]
    MISSED_FIELD_NUMBER: _ClassVar[int]
    fingerprint: bytes
    hashes: bytes
    read: bool
    missed: int
    def __init__(self, fingerprint: _Optional[bytes] = ..., hashes: _Optional[bytes] = ..., read: bool = ..., missed: _Optional[int] = ...) -> None: ...

class LookupCount(_message.Message):
    __slots__ = ("fingerprint", "asked", "arena", "disk", "redis", "objects")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    ASKED_FIELD_NUMBER: _ClassVar[int]
    ARENA_FIELD_NUMBER: _ClassVar[int]
    DISK_FIELD_NUMBER: _ClassVar[int]
    REDIS_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    fingerprint: bytes
    asked: int
    arena: int
    disk: int
    redis: int
    objects: int
    def __init__(self, fingerprint: _Optional[bytes] = ..., asked: _Optional[int] = ..., arena: _Optional[int] = ..., disk: _Optional[int] = ..., redis: _Optional[int] = ..., objects: _Optional[int] = ...) -> None: ...

class UseReport(_message.Message):
    __slots__ = ("uses", "lookups")
    USES_FIELD_NUMBER: _ClassVar[int]
    LOOKUPS_FIELD_NUMBER: _ClassVar[int]
    uses: _containers.RepeatedCompositeFieldContainer[PageUse]
    lookups: _containers.RepeatedCompositeFieldContainer[LookupCount]
    def __init__(self, uses: _Optional[_Iterable[_Union[PageUse, _Mapping]]] = ..., lookups: _Optional[_Iterable[_Union[LookupCount, _Mapping]]] = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("queries",)
    QUERIES_FIELD_NUMBER: _ClassVar[int]
    queries: _containers.RepeatedCompositeFieldContainer[PageList]
    def __init__(self, queries: _Optional[_Iterable[_Union[PageList, _Mapping]]] = ...) -> None: ...

class LookupReply(_message.Message):
    __slots__ = ("tiers",)
    TIERS_FIELD_NUMBER: _ClassVar[int]
    tiers: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, tiers: _Optional[_Iterable[bytes]] = ...) -> None: ...

class ExplainReply(_message.Message):
    __slots__ = ("tiers", "absences")
    TIERS_FIELD_NUMBER: _ClassVar[int]
    ABSENCES_FIELD_NUMBER: _ClassVar[int]
    tiers: bytes
    absences: bytes
    def __init__(self, tiers: _Optional[bytes] = ..., absences: _Optional[bytes] = ...) -> None: ...

class PrepareStoreRequest(_message.Message):
    __slots__ = ("pages", "client", "ttl_ms", "parent", "ahead", "ahead_evict", "used")
    PAGES_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    AHEAD_EVICT_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    pages: PageList
    client: int
    ttl_ms: int
    parent: bytes
    ahead: int
    ahead_evict: bool
    used: UseReport
    def __init__(self, pages: _Optional[_Union[PageList, _Mapping]] = ..., client: _Optional[int] = ..., ttl_ms: _Optional[int] = ..., parent: _Optional[bytes] = ..., ahead: _Optional[int] = ..., ahead_evict: bool = ..., used: _Optional[_Union[UseReport, _Mapping]] = ...) -> None: ...

class PrepareStoreReply(_message.Message):
    __slots__ = ("ticket", "outcomes", "offsets")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    ticket: int
    outcomes: bytes
    offsets: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ticket: _Optional[int] = ..., outcomes: _Optional[bytes] = ..., offsets: _Optional[_Iterable[int]] = ...) -> None: ...

class CompleteStoreRequest(_message.Message):
    __slots__ = ("ticket", "publish", "client", "pages", "outcomes", "parent", "part_at", "part_slots", "used")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    PART_AT_FIELD_NUMBER: _ClassVar[int]
    PART_SLOTS_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    ticket: int
    publish: bool
    client: int
    pages: PageList
    outcomes: bytes
    parent: bytes
    part_at: int
    part_slots: int
    used: UseReport
    def __init__(self, ticket: _Optional[int] = ..., publish: bool = ..., client: _Optional[int] = ..., pages: _Optional[_Union[PageList, _Mapping]] = ..., outcomes: _Optional[bytes] = ..., parent: _Optional[bytes] = ..., part_at: _Optional[int] = ..., part_slots: _Optional[int] = ..., used: _Optional[_Union[UseReport, _Mapping]] = ...) -> None: ...

class StoreCounts(_message.Message):
    __slots__ = ("stored", "present", "refused")
    STORED_FIELD_NUMBER: _ClassVar[int]
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    stored: int
    present: int
    refused: int
    def __init__(self, stored: _Optional[int] = ..., present: _Optional[int] = ..., refused: _Optional[int] = ...) -> None: ...

class PrepareLoadRequest(_message.Message):
    __slots__ = ("pages", "client", "ttl_ms", "used")
    PAGES_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    pages: PageList
    client: int
    ttl_ms: int
    used: UseReport
    def __init__(self, pages: _Optional[_Union[PageList, _Mapping]] = ..., client: _Optional[int] = ..., ttl_ms: _Optional[int] = ..., used: _Optional[_Union[UseReport, _Mapping]] = ...) -> None: ...

class PrepareLoadReply(_message.Message):
    __slots__ = ("ticket", "tiers", "offsets")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    ticket: int
    tiers: bytes
    offsets: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ticket: _Optional[int] = ..., tiers: _Optional[bytes] = ..., offsets: _Optional[_Iterable[int]] = ...) -> None: ...

class CompleteLoadRequest(_message.Message):
    __slots__ = ("ticket", "client")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    ticket: int
    client: int
    def __init__(self, ticket: _Optional[int] = ..., client: _Optional[int] = ...) -> None: ...

class CompleteLoadReply(_message.Message):
    __slots__ = ("valid",)
    VALID_FIELD_NUMBER: _ClassVar[int]
    valid: bool
    def __init__(self, valid: bool = ...) -> None: ...

class LoadPages(_message.Message):
    __slots__ = ("pages",)
    PAGES_FIELD_NUMBER: _ClassVar[int]
    pages: PageList
    def __init__(self, pages: _Optional[_Union[PageList, _Mapping]] = ...) -> None: ...

class PageRun(_message.Message):
    __slots__ = ("tiers", "checksums")
    TIERS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    tiers: bytes
    checksums: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tiers: _Optional[bytes] = ..., checksums: _Optional[_Iterable[int]] = ...) -> None: ...

class StorePages(_message.Message):
    __slots__ = ("ticket", "checksums", "request")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    ticket: int
    checksums: _containers.RepeatedScalarFieldContainer[int]
    request: PrepareStoreRequest
    def __init__(self, ticket: _Optional[int] = ..., checksums: _Optional[_Iterable[int]] = ..., request: _Optional[_Union[PrepareStoreRequest, _Mapping]] = ...) -> None: ...

class PageCount(_message.Message):
    __slots__ = ("pages",)
    PAGES_FIELD_NUMBER: _ClassVar[int]
    pages: int
    def __init__(self, pages: _Optional[int] = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("pages", "seconds")
    PAGES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    pages: PageList
    seconds: int
    def __init__(self, pages: _Optional[_Union[PageList, _Mapping]] = ..., seconds: _Optional[int] = ...) -> None: ...

class ClearRequest(_message.Message):
    __slots__ = ("fingerprint",)
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    fingerprint: bytes
    def __init__(self, fingerprint: _Optional[bytes] = ...) -> None: ...

class FlushRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlushReply(_message.Message):
    __slots__ = ("pages",)
    PAGES_FIELD_NUMBER: _ClassVar[int]
    pages: int
    def __init__(self, pages: _Optional[int] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TierHealth(_message.Message):
    __slots__ = ("state", "since", "reason")
    STATE_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    state: TierState
    since: float
    reason: str
    def __init__(self, state: _Optional[_Union[TierState, str]] = ..., since: _Optional[float] = ..., reason: _Optional[str] = ...) -> None: ...

class TierStatus(_message.Message):
    __slots__ = ("name", "used_bytes", "limit_bytes", "pages", "counters", "health", "requests", "requests_dollars")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class RequestsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    HEALTH_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_DOLLARS_FIELD_NUMBER: _ClassVar[int]
    name: str
    used_bytes: int
    limit_bytes: int
    pages: int
    counters: _containers.ScalarMap[str, int]
    health: TierHealth
    requests: _containers.ScalarMap[str, int]
    requests_dollars: float
    def __init__(self, name: _Optional[str] = ..., used_bytes: _Optional[int] = ..., limit_bytes: _Optional[int] = ..., pages: _Optional[int] = ..., counters: _Optional[_Mapping[str, int]] = ..., health: _Optional[_Union[TierHealth, _Mapping]] = ..., requests: _Optional[_Mapping[str, int]] = ..., requests_dollars: _Optional[float] = ...) -> None: ...

class NamespaceStatus(_message.Message):
    __slots__ = ("name", "fingerprint", "page_bytes", "arena_pages", "used_bytes", "quota_bytes", "durability", "pinned_pages", "layout", "age_seconds", "idle_seconds", "labels", "counters")
    class UsedBytesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class QuotaBytesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    ARENA_PAGES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUOTA_BYTES_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    PINNED_PAGES_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    IDLE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    fingerprint: bytes
    page_bytes: int
    arena_pages: int
    used_bytes: _containers.ScalarMap[str, int]
    quota_bytes: _containers.ScalarMap[str, int]
    durability: str
    pinned_pages: int
    layout: str
    age_seconds: float
    idle_seconds: float
    labels: _containers.RepeatedScalarFieldContainer[str]
    counters: _containers.ScalarMap[str, int]
    def __init__(self, name: _Optional[str] = ..., fingerprint: _Optional[bytes] = ..., page_bytes: _Optional[int] = ..., arena_pages: _Optional[int] = ..., used_bytes: _Optional[_Mapping[str, int]] = ..., quota_bytes: _Optional[_Mapping[str, int]] = ..., durability: _Optional[str] = ..., pinned_pages: _Optional[int] = ..., layout: _Optional[str] = ..., age_seconds: _Optional[float] = ..., idle_seconds: _Optional[float] = ..., labels: _Optional[_Iterable[str]] = ..., counters: _Optional[_Mapping[str, int]] = ...) -> None: ...

class ClientStatus(_message.Message):
    __slots__ = ("name", "way", "seconds", "host")
    NAME_FIELD_NUMBER: _ClassVar[int]
    WAY_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    name: str
    way: str
    seconds: float
    host: str
    def __init__(self, name: _Optional[str] = ..., way: _Optional[str] = ..., seconds: _Optional[float] = ..., host: _Optional[str] = ...) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("version", "instance", "pid", "uptime_seconds", "tiers", "namespaces", "clients", "arena_directory", "disk_directory", "time", "hash_check", "connected", "certificate_ends", "lookups", "certificate_begins", "core")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    ARENA_DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    DISK_DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    HASH_CHECK_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_ENDS_FIELD_NUMBER: _ClassVar[int]
    LOOKUPS_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_BEGINS_FIELD_NUMBER: _ClassVar[int]
    CORE_FIELD_NUMBER: _ClassVar[int]
    version: str
    instance: int
    pid: int
    uptime_seconds: float
    tiers: _containers.RepeatedCompositeFieldContainer[TierStatus]
    namespaces: _containers.RepeatedCompositeFieldContainer[NamespaceStatus]
    clients: int
    arena_directory: str
    disk_directory: str
    time: float
    hash_check: bytes
    connected: _containers.RepeatedCompositeFieldContainer[ClientStatus]
    certificate_ends: float
    lookups: LookupCount
    certificate_begins: float
    core: str
    def __init__(self, version: _Optional[str] = ..., instance: _Optional[int] = ..., pid: _Optional[int] = ..., uptime_seconds: _Optional[float] = ..., tiers: _Optional[_Iterable[_Union[TierStatus, _Mapping]]] = ..., namespaces: _Optional[_Iterable[_Union[NamespaceStatus, _Mapping]]] = ..., clients: _Optional[int] = ..., arena_directory: _Optional[str] = ..., disk_directory: _Optional[str] = ..., time: _Optional[float] = ..., hash_check: _Optional[bytes] = ..., connected: _Optional[_Iterable[_Union[ClientStatus, _Mapping]]] = ..., certificate_ends: _Optional[float] = ..., lookups: _Optional[_Union[LookupCount, _Mapping]] = ..., certificate_begins: _Optional[float] = ..., core: _Optional[str] = ...) -> None: ...

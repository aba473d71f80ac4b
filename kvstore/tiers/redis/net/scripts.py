"""Lua scripts: all that ever changes a bucket or replaces an entry, each in one atomic step.

``admit``, ``touch``, ``trim``, ``idle``, ``expire`` and ``release`` get a bucket's order, chunks and sums as their
first keys. A chunk's field in ``chunks`` is ``charge:live pages:header bytes:parts:namespace``.

A server beyond its ``maxmemory`` refuses a script's *first* write if that could take memory, and none after it. So each
script begins with the write that may be refused, or with one that never is: it does all or nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from kvstore.tiers.redis.net.resp import Argument

_BUCKET = """
local order, chunks, books = KEYS[1], KEYS[2], KEYS[3]
local base = string.sub(order, 1, -6)

local function line_of(id)
  local line = redis.call('HGET', chunks, id)
  if not line then return nil end
  local charge, live, header, parts, namespace = string.match(line, '^(%d+):(%d+):(%d+):(%d+):(.*)$')
  return tonumber(charge), tonumber(live), tonumber(header), tonumber(parts), namespace
end

local function sum_of(field)
  return tonumber(redis.call('HGET', books, field) or '0')
end

local function book(field, change)
  local value = sum_of(field) + change
  if value > 0 then
    redis.call('HSET', books, field, string.format('%.0f', value))
  else
    redis.call('HDEL', books, field)
  end
end

local function drop(id)
  local charge, live, header, parts, namespace = line_of(id)
  local head = ''
  if charge then
    head = redis.call('GETRANGE', base .. 'chunk:' .. id .. ':0', 0, header - 1)
    for part = 0, parts - 1 do redis.call('DEL', base .. 'chunk:' .. id .. ':' .. part) end
  end
  redis.call('ZREM', order, id)
  redis.call('HDEL', chunks, id)
  if charge then
    redis.call('ZREM', order .. ':' .. namespace, id)
    book('bytes', -charge)
    book('bytes:' .. namespace, -charge)
    book('pages', -live)
  end
  return {id, live or 0, head}
end

local function drop_oldest(of, field, most, left)
  while sum_of(field) > most do
    local oldest = redis.call('ZRANGE', of, 0, 0)[1]
    if not oldest then return false end
    left[#left + 1] = drop(oldest)
    redis.call('ZREM', of, oldest)
  end
  return true
end

local function now()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000000 + tonumber(time[2])
end
"""

_ADMIT = (
    _BUCKET
    + """
local id, charge, pages, header, parts = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4], tonumber(ARGV[5])
local budget, ttl, namespace, quota = tonumber(ARGV[6]), ARGV[7], ARGV[8], tonumber(ARGV[9])
local claim, claim_ms = base .. 'claim:' .. ARGV[10], ARGV[11]
if charge > budget or (quota and charge > quota) then return {} end
local holder = redis.pcall('GET', claim)
if holder == '' and ARGV[12] == '0' then return {2, 0} end
if type(holder) == 'string' and line_of(holder) then return {2, redis.call('PTTL', claim)} end
redis.call('SET', claim, id, 'PX', claim_ms)
for part = 0, parts - 1 do redis.call('SET', base .. 'chunk:' .. id .. ':' .. part, '', 'PX', ttl) end
local left = {}
if quota and not drop_oldest(order .. ':' .. namespace, 'bytes:' .. namespace, quota - charge, left) then
  redis.call('HDEL', books, 'bytes:' .. namespace)
end
if not drop_oldest(order, 'bytes', budget - charge, left) then
  redis.call('DEL', books, chunks)
end
local time = now()
redis.call('ZADD', order, time, id)
redis.call('ZADD', order .. ':' .. namespace, time, id)
redis.call('HSET', chunks, id, string.format('%.0f:%.0f:%s:%.0f:', charge, pages, header, parts) .. namespace)
book('bytes', charge)
book('bytes:' .. namespace, charge)
book('pages', pages)
return {1, left}
"""
)

_TOUCH = (
    _BUCKET
    + """
local found, time = {}, now()
for place = 1, #ARGV - 1 do
  local id = ARGV[place + 1]
  local charge, live, header, parts, namespace = line_of(id)
  found[place] = 0
  if charge then
    local whole = true
    for part = 0, parts - 1 do
      if redis.call('STRLEN', base .. 'chunk:' .. id .. ':' .. part) == 0 then whole = false end
    end
    if whole then
      found[place] = 1
      redis.pcall('ZADD', order, 'XX', time - place, id)
      redis.pcall('ZADD', order .. ':' .. namespace, 'XX', time - place, id)
      for part = 0, parts - 1 do redis.pcall('PEXPIRE', base .. 'chunk:' .. id .. ':' .. part, ARGV[1]) end
    elseif redis.call('EXISTS', base .. 'chunk:' .. id .. ':0') == 0 then
      drop(id)
    end
  end
end
return found
"""
)

_RELEASE = (
    _BUCKET
    + """
local id, gone = ARGV[1], tonumber(ARGV[2])
local charge, live, header, parts, namespace = line_of(id)
if not charge then return 0 end
if live <= gone then
  drop(id)
  return 1
end
redis.call('HDEL', chunks, id)
local line = string.format('%.0f:%.0f:%.0f:%.0f:', charge, live - gone, header, parts) .. namespace
redis.call('HSET', chunks, id, line)
book('pages', -gone)
return 0
"""
)

_TRIM = (
    _BUCKET
    + """
local namespace, most = ARGV[1], tonumber(ARGV[2])
local left = {}
drop_oldest(order .. ':' .. namespace, 'bytes:' .. namespace, most, left)
return left
"""
)

_IDLE = (
    _BUCKET
    + """
local newest = redis.call('ZREVRANGE', order .. ':' .. ARGV[1], 0, 0, 'WITHSCORES')[2]
if not newest then return -1 end
return math.max(0, now() - newest)
"""
)

_EXPIRE = (
    _BUCKET
    + """
local of, before, left = order .. ':' .. ARGV[1], now() - tonumber(ARGV[2]), {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', of, '-inf', string.format('%.0f', before), 'LIMIT', 0, ARGV[3])) do
  left[#left + 1] = drop(id)
  redis.call('ZREM', of, id)
end
return left
"""
)

_RENEW = """
local found = {}
for place, name in ipairs(KEYS) do
  local entry = redis.pcall('GET', name)
  found[place] = false
  if type(entry) == 'string' then
    redis.pcall('PEXPIRE', name, ARGV[1])
    found[place] = entry
  end
end
return found
"""

_FORGET = """
local gone = {}
for place, name in ipairs(KEYS) do
  local entry = redis.pcall('GET', name)
  gone[place] = 0
  if type(entry) == 'string' and string.sub(entry, 1, #ARGV[1]) == ARGV[1] then
    redis.call('DEL', name)
    gone[place] = 1
  end
end
return gone
"""

_REPOINT = """
local done = {}
for place, name in ipairs(KEYS) do
  local old, new = ARGV[2 * place], ARGV[2 * place + 1]
  local entry = redis.pcall('GET', name)
  done[place] = 0
  if type(entry) == 'string' and string.sub(entry, 1, #old) == old then
    redis.call('SET', name, new, 'PX', ARGV[1])
    done[place] = 1
  end
end
return done
"""

_PLACE = """
local done = {}
for place, name in ipairs(KEYS) do
  local seen, new = ARGV[2 * place], ARGV[2 * place + 1]
  local now = redis.pcall('GET', name)
  done[place] = '0'
  if not now or now == seen then
    redis.call('SET', name, new, 'PX', ARGV[1])
    done[place] = '1'
  end
end
return table.concat(done)
"""

ALL = (_ADMIT, _TOUCH, _RELEASE, _TRIM, _IDLE, _EXPIRE, _RENEW, _FORGET, _REPOINT, _PLACE)


def call(script: bytes, keys: Sequence[bytes], *arguments: bytes) -> list[Argument]:
    """The command that runs a script."""
    return [b"EVALSHA", script, b"%d" % len(keys), *keys, *arguments]


def _digest(script: str) -> bytes:
    return hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest().encode()


ADMIT = _digest(_ADMIT)
"""Make a place for a chunk, and evict the bucket's oldest chunks for it.

Keys: the bucket. Arguments: nonce, charge, pages, header bytes, parts, budget, milliseconds to live, namespace, and the
most bytes of that namespace (empty: no quota): beyond it, its own oldest are evicted first; then the name of the claim
to it, for how many milliseconds that holds, and 1 for a writer who has looked since another one ended it. Answers
nothing at all when the chunk is larger than budget or quota; 2 and milliseconds while another chunk holds the claim; 2
and 0 where that was placed just now; else 1 and a list with (nonce, live pages, header) of each that was evicted. Until
its parts are set (``SET … XX``, which does nothing where no place stands) it is empty.

A claim ends with its time, or with its chunk. It is empty for a moment behind the placing of entries, for writers who
looked for these before.
"""
TOUCH = _digest(_TOUCH)
"""Mark chunks as used, the first named as the newest. Keys: the bucket. Arguments: milliseconds to live, nonces.
Answers for each 1 when it is whole. One whose bytes the server has dropped by itself is not charged any more."""
RELEASE = _digest(_RELEASE)
"""Some of a chunk's pages have no entry any more; with the last one the chunk goes. Keys: the bucket.
Arguments: nonce, how many."""
TRIM = _digest(_TRIM)
"""Evict a namespace's oldest chunks until it has no more than some bytes. Keys: the bucket. Arguments: namespace,
bytes. Answers these chunks as ``ADMIT`` does."""
IDLE = _digest(_IDLE)
"""For how many microseconds no chunk of a namespace was used; -1: there is none. Keys: the bucket. Argument:
namespace."""
EXPIRE = _digest(_EXPIRE)
"""Drop a namespace's chunks that were not used for some microseconds, oldest first. Keys: the bucket. Arguments:
namespace, microseconds, most chunks. Answers these chunks as ``ADMIT`` does."""
RENEW = _digest(_RENEW)
"""What stands in entries; they live on. Keys: entries. Argument: milliseconds to live."""
FORGET = _digest(_FORGET)
"""Delete entries if they begin with a reference. Keys: entries. Argument: the reference. Answers 1 for each deleted."""
REPOINT = _digest(_REPOINT)
"""Replace entries if they begin with a reference. Keys: entries. Arguments: milliseconds to live, and for each entry
the reference and what comes instead. Answers 1 for each replaced."""
PLACE = _digest(_PLACE)
"""Put entries where nothing stands, or still what was seen there and is of no use. Keys: entries. Arguments:
milliseconds to live, and for each entry what was seen there and what comes. Answers a digit for each: 1 where it was
put."""

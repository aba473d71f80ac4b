"""What a Redis does in one step for the cache of answers, in its own language. See :mod:`kvstore.responses.redis`.

Each has ``KEYS`` order, sizes, bytes, and the prefix of all others as ``ARGV[1]``.
"""

_DROP = """
local prefix = ARGV[1]
local function drop(name)
  local size, group = redis.call('HGET', KEYS[2], name), redis.call('HGET', prefix .. 'groups', name)
  redis.call('DEL', prefix .. 'entry:' .. name)
  local was = redis.call('ZREM', KEYS[1], name)
  if size then
    redis.call('HDEL', KEYS[2], name)
    redis.call('DECRBY', KEYS[3], size)
  end
  if group then
    redis.call('HDEL', prefix .. 'groups', name)
    redis.call('ZREM', prefix .. 'group:' .. group, name)
  end
  return was
end
local function drop_outcome(member)
  local number, size, learner = string.match(member, '^(%d+):(%d+):(.*)$')
  redis.call('ZREM', prefix .. 'outcomes', member)
  redis.call('DECRBY', KEYS[3], size)
  redis.call('DECRBY', prefix .. 'outcome-bytes', size)
  redis.call('ZREMRANGEBYSCORE', prefix .. 'learnt:' .. learner, number, number)
  if redis.call('ZCARD', prefix .. 'learnt:' .. learner) == 0 then
    redis.call('HDEL', prefix .. 'learners', learner)
  end
end
local function drop_learnt(learner, member)
  local number = string.match(member, '^(%d+):')
  if number then
    drop_outcome(number .. ':' .. (#member - #number - 1) .. ':' .. learner)
  end
  redis.call('ZREM', prefix .. 'learnt:' .. learner, member)
end
local function drop_ended()
  local time = redis.call('TIME')
  local now = time[1] * 1000 + math.floor(time[2] / 1000)
  for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, 1000)) do drop(name) end
  local ended = redis.call('ZRANGEBYSCORE', prefix .. 'outcomes', '-inf', now, 'LIMIT', 0, 1000)
  for _, member in ipairs(ended) do drop_outcome(member) end
  return now
end
local function make_room(entries, bytes, more_entries, more_bytes)
  while redis.call('ZCARD', KEYS[1]) + more_entries > entries
      or tonumber(redis.call('GET', KEYS[3]) or '0') + more_bytes > bytes do
    local first = redis.call('ZRANGE', KEYS[1], 0, 0)[1]
    if not first then
      for _, member in ipairs(redis.call('ZRANGE', prefix .. 'outcomes', 0, -1)) do drop_outcome(member) end
      redis.call('SET', KEYS[3], '0')
      redis.call('SET', prefix .. 'outcome-bytes', '0')
      return
    end
    drop(first)
  end
end
local function lives(key, milliseconds)
  if redis.call('PTTL', key) < tonumber(milliseconds) then redis.call('PEXPIRE', key, milliseconds) end
end
"""

# name, bytes, milliseconds to live, most entries, most bytes, new epoch, group, prompt, most prompts, fields …
PUT = (
    _DROP
    + """
local name, size, left, epoch, group, prompt = ARGV[2], tonumber(ARGV[3]), ARGV[4], ARGV[7], ARGV[8], ARGV[9]
local entry = prefix .. 'entry:' .. name
redis.call('SETNX', prefix .. 'epoch', epoch)
local now = drop_ended()
drop(name)
make_room(tonumber(ARGV[5]), tonumber(ARGV[6]), 1, size)
redis.call('HSET', entry, unpack(ARGV, 11))
if group ~= '' then
  local members = prefix .. 'group:' .. group
  redis.call('HSET', entry, 'prompt', prompt)
  redis.call('HSET', prefix .. 'groups', name, group)
  redis.call('ZADD', members, redis.call('INCR', prefix .. 'sequence'), name)
  lives(members, left)
  while redis.call('ZCARD', members) > tonumber(ARGV[10]) do
    local oldest = redis.call('ZRANGE', members, 0, 0)[1]
    local taken = redis.call('HSTRLEN', prefix .. 'entry:' .. oldest, 'prompt')
    redis.call('ZREM', members, oldest)
    redis.call('HDEL', prefix .. 'groups', oldest)
    if taken > 0 then
      redis.call('HDEL', prefix .. 'entry:' .. oldest, 'prompt')
      redis.call('HINCRBY', KEYS[2], oldest, -taken)
      redis.call('DECRBY', KEYS[3], taken)
    end
  end
end
redis.call('PEXPIRE', entry, left)
redis.call('ZADD', KEYS[1], now + left, name)
redis.call('HSET', KEYS[2], name, size)
redis.call('INCRBY', KEYS[3], size)
return 1
"""
)

# learner, sealed, milliseconds to live, most entries, most bytes, most bytes of outcomes, most of a learner, its label,
# new epoch
LEARN = (
    _DROP
    + """
local learner, sealed, left, of_outcomes = ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[7])
local learnt, all, size = prefix .. 'learnt:' .. learner, prefix .. 'outcomes', #sealed
redis.call('SETNX', prefix .. 'epoch', ARGV[10])
local now = drop_ended()
while tonumber(redis.call('GET', prefix .. 'outcome-bytes') or '0') + size > of_outcomes do
  local first = redis.call('ZRANGE', all, 0, 0)[1]
  if not first then redis.call('SET', prefix .. 'outcome-bytes', '0') break end
  drop_outcome(first)
end
make_room(tonumber(ARGV[5]), tonumber(ARGV[6]), 0, size)
local number = redis.call('INCR', prefix .. 'sequence')
redis.call('HSET', prefix .. 'learners', learner, ARGV[9])
redis.call('ZADD', learnt, number, number .. ':' .. sealed)
lives(learnt, left)
redis.call('ZADD', all, now + left, number .. ':' .. size .. ':' .. learner)
redis.call('INCRBY', KEYS[3], size)
redis.call('INCRBY', prefix .. 'outcome-bytes', size)
while redis.call('ZCARD', learnt) > tonumber(ARGV[8]) do
  local oldest = redis.call('ZRANGE', learnt, 0, 0)[1]
  drop_learnt(learner, oldest)
end
return 1
"""
)

# group, learner, epoch and number of prompts, of outcomes that were seen, most of each, fields …
NEWS = """
local prefix, epoch, most = ARGV[1], redis.call('GET', ARGV[1] .. 'epoch') or '', ARGV[8]
local prompt, outcome = ARGV[5], ARGV[7]
if epoch ~= ARGV[4] then prompt = '0' end
if epoch ~= ARGV[6] then outcome = '0' end
local prompts = redis.call(
  'ZRANGEBYSCORE', prefix .. 'group:' .. ARGV[2], '(' .. prompt, '+inf', 'WITHSCORES', 'LIMIT', 0, most)
local found = {}
for place = 1, #prompts, 2 do
  local fields = redis.call('HMGET', prefix .. 'entry:' .. prompts[place], unpack(ARGV, 9))
  found[#found + 1] = {prompts[place], prompts[place + 1], fields}
end
local outcomes = redis.call(
  'ZRANGEBYSCORE', prefix .. 'learnt:' .. ARGV[3], '(' .. outcome, '+inf', 'WITHSCORES', 'LIMIT', 0, most)
return {epoch, prompt, outcome, found, outcomes}
"""

# names …
DELETE = (
    _DROP
    + """
local gone = 0
for place = 2, #ARGV do gone = gone + drop(ARGV[place]) end
return gone
"""
)

# new epoch, learners …
FORGET = (
    _DROP
    + """
redis.call('SET', prefix .. 'epoch', ARGV[2])
for place = 3, #ARGV do
  local learner = ARGV[place]
  for _, member in ipairs(redis.call('ZRANGE', prefix .. 'learnt:' .. learner, 0, -1)) do
    drop_learnt(learner, member)
  end
end
return 1
"""
)

USAGE = (
    _DROP
    + """
drop_ended()
local bytes = tonumber(redis.call('GET', KEYS[3]) or '0')
local prompts, outcomes = redis.call('HLEN', prefix .. 'groups'), redis.call('ZCARD', prefix .. 'outcomes')
return {redis.call('ZCARD', KEYS[1]), bytes, prompts, outcomes}
"""
)

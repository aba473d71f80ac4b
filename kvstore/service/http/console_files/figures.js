"use strict";

// What is computed and written of a node's answers: functions of their arguments alone, without the page.

const TIER_NAMES = {arena: "arena", disk: "disk", redis: "Redis", objects: "objects"};

function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  while (count >= 1024 && unit < units.length - 1) { count /= 1024; unit += 1; }
  return (unit && count < 100 ? count.toFixed(1) : Math.round(count)) + " " + units[unit];
}

function duration(seconds) {
  if (seconds < 90) return Math.round(seconds) + " s";
  if (seconds < 5400) return Math.round(seconds / 60) + " min";
  if (seconds < 172800) return (seconds / 3600).toFixed(1) + " h";
  return Math.round(seconds / 86400) + " d";
}

function latency(seconds) {
  if (seconds < 0.001) return Math.round(seconds * 1e6) + " µs";
  if (seconds < 1) return (seconds * 1e3).toFixed(seconds < 0.1 ? 1 : 0) + " ms";
  return seconds.toFixed(1) + " s";
}

const count = (number) => number.toLocaleString("en");
const plural = (number, one, more) => `${count(number)} ${number === 1 ? one : more}`;
const percent = (part, whole) => whole ? (100 * part / whole).toFixed(1) + " %" : "–";
const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString("en-GB");

// Control characters, and those that turn the direction of writing or can't be seen, as escapes.
function escaped(text) {
  return String(text).replace(/[\u0000-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g,
    (each) => "\\u" + each.charCodeAt(0).toString(16).padStart(4, "0"));
}

// A rate a second between each sample and the one before. Counters that went back began anew: no rate.
function rates(times, values) {
  return values.map((value, at) => {
    const before = at ? values[at - 1] : null;
    if (value === null || before === null) return null;
    const seconds = times[at] - times[at - 1], more = value - before;
    return seconds > 0 && more >= 0 ? more / seconds : null;
  });
}

// Of each sample the part, in percent, that a column's increase has of the increases of all columns together.
function shares(samples, column, all) {
  const every = all.map((name) => rates(samples.time, samples[name]));
  return rates(samples.time, samples[column]).map((rate, at) => {
    const asked = every.reduce((sum, each) => sum + (each[at] || 0), 0);
    return rate === null || !asked ? null : 100 * rate / asked;
  });
}

// Where the last so many seconds of samples begin: there are two at least, or none.
function firstWithin(times, seconds) {
  const end = times[times.length - 1] - seconds;
  return Math.max(0, Math.min(times.findIndex((time) => time >= end), times.length - 2));
}

// Lookups of the last so many seconds: pages asked for, and found by tier. null: there are no samples, or the node does
// not count lookups.
function lookups(samples, seconds) {
  const times = samples.time, last = times.length - 1, first = firstWithin(times, seconds);
  const more = (name) => {
    const values = samples[name];
    return !values || values[last] === null || values[first] === null ? null : Math.max(0, values[last] - values[first]);
  };
  if (last < 1) return null;
  const asked = more("looked_up"), found = ["arena", "disk", "redis"].map((tier) => more("found_" + tier));
  if (asked === null || found.includes(null)) return null;
  return {asked, arena: found[0], disk: found[1], redis: found[2], objects: more("found_objects") || 0, seconds: times[last] - times[first]};
}

// The headline: the ratio, what it is of, and where pages were found.
function headline(samples, seconds) {
  const told = lookups(samples, seconds);
  if (told === null) {
    const waits = samples.time.length < 2;
    return {ratio: "–", of: waits ? "The first figures come in a few seconds." : "This node does not count lookups.", found: ""};
  }
  const time = duration(told.seconds), hits = told.arena + told.disk + told.redis + told.objects;
  if (!told.asked) return {ratio: "–", of: `Nobody looked anything up in the last ${time}.`, found: ""};
  const tiers = Object.keys(TIER_NAMES).filter((tier) => told[tier]).map((tier) => `${TIER_NAMES[tier]} ${percent(told[tier], told.asked)}`);
  return {
    ratio: percent(hits, told.asked),
    of: `${count(hits)} of ${count(told.asked)} pages that were looked up in the last ${time} were found.`,
    found: tiers.join(", "),
  };
}

// Pages that lookups found, in whatever tier; older nodes have no object tier.
function foundIn(counters) {
  return counters.found_arena + counters.found_disk + counters.found_redis + (counters.found_objects || 0);
}

// Hits of a namespace since the node started, as text; a node that does not count lookups says nothing of them.
function hitRatio(counters) {
  const found = foundIn(counters);
  return counters.looked_up > 0 && found >= 0 ? percent(found, counters.looked_up) : "–";
}

// A part of a list of samples, by column.
function within(samples, seconds) {
  if (!samples.time.length) return samples;
  const first = firstWithin(samples.time, seconds);
  return Object.fromEntries(Object.entries(samples).map(([name, values]) => [name, values.slice(first)]));
}

// What an address says behind its #: what is shown. What is not in it, or makes no sense, is as it is at first.
const RANGES = [[300, "5 min"], [900, "15 min"], [3600, "1 h"]];
const COLUMNS = [["name", "name"], ["arena", "arena"], ["disk", "disk"], ["redis", "Redis"], ["objects", "objects"], ["hits", "hits"], ["asked", "looked up"], ["idle", "unused for"]];
const SHOWN = {range: "900", sort: "size", order: "desc", filter: "", from: "0", namespace: ""};

function parseFragment(fragment) {
  const given = new URLSearchParams(fragment.replace(/^#/, ""));
  const view = {...SHOWN};
  for (const name of Object.keys(view)) if (given.has(name)) view[name] = given.get(name).slice(0, 200);
  if (!RANGES.some(([seconds]) => String(seconds) === view.range)) view.range = SHOWN.range;
  if (!COLUMNS.some(([column]) => column === view.sort)) view.sort = SHOWN.sort;
  if (view.order !== "asc") view.order = "desc";
  if (!/^\d{1,9}$/.test(view.from)) view.from = "0";
  return view;
}

function fragmentOf(view) {
  const told = Object.entries(view).filter(([name, value]) => value !== SHOWN[name]);
  return "#" + new URLSearchParams(told);
}

// What becomes of the order when a column's header is pressed: figures begin with the largest, names with the first.
function pressed(view, column) {
  const order = view.sort === column ? (view.order === "asc" ? "desc" : "asc") : (column === "name" ? "asc" : "desc");
  return {...view, sort: column, order, from: "0"};
}

// Why a request failed: the node's machine took it and nothing came, or nobody took it, or it was answered with a no.
function failure(status, timedOut) {
  if (status === 401 || status === 403) return `answers ${status}: a token that sees all tenants is needed`;
  if (status) return `answers ${status}`;
  return timedOut ? "not answering" : "gone";
}

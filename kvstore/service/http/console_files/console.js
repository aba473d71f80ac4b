"use strict";

// Everything that is shown comes from one JSON document, asked for again every few seconds. Text is always set as text.

const STEP_MS = 5000;
const RETRY_MS = 1000;
const TIMEOUT_MS = 5000;
const OLD_MS = 15000;
const MOST_SAMPLES = 720;
const CALLS = ["lookup", "load", "store"];
const FOUND = ["found_arena", "found_disk", "found_redis", "found_objects"];
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const el = (id) => document.getElementById(id);

let view = parseFragment(location.hash);
let samples = {time: []};
let node = null;  // as the last answer has it
let charts = {};
let watched = null;  // the namespace that is open, with samples since then
let asking = null;
let next = 0;
let answered = Date.now();
let trouble = "";

const seconds = () => Number(view.range);
const TIERS = [["arena", "arena", ""], ["disk", "disk", ""], ["Redis", "redis", ""], ["objects", "objects", ""]];
const DASHES = {disk: [8, 4], redis: [2, 3], objects: [6, 2], missed: [12, 3, 2, 3], bad: [8, 4]};  // told apart without colours, too
const CHARTS = {
  hits: {top: 100, of: (part) => [...TIERS.map(([label, name]) => [label, name, found(part, "found_" + name)]), ["nowhere", "missed", nowhere(part)]]},
  loads: {top: 100, of: (part) => [...TIERS, ["nowhere", "missed"]].map(([label, name]) => [label, name, shares(part, name, ["arena", "disk", "redis", "objects", "missed"])])},
  latency: {of: (part) => CALLS.map((call, at) => [call, ["missed", "arena", "redis"][at], (part[call + "_p99"] || []).map((each) => each === null ? null : 1e3 * each)])},
  throughput: {of: (part) => [["loaded", "arena", megabytes(part, "loaded_bytes")], ["stored", "redis", megabytes(part, "stored_bytes")]]},
  filling: {top: 100, of: (part) => TIERS.map(([label, name]) => [label, name, filling(part, name)])},
  leaving: {of: (part) => [["evicted", "arena", "evicted"], ["overrun", "bad", "overrun"], ["refused", "disk", "refused"]].map(([label, name, column]) => [label, name, rates(part.time, part[column] || [])])},
};
const ACTIVITY = {of: (part) => [["looked up", "missed", "looked_up"], ["loaded", "arena", "loaded"], ["stored", "redis", "stored"]].map(([label, name, column]) => [label, name, rates(part.time, part[column])])};

function found(part, column) {
  const asked = rates(part.time, part.looked_up || []), hits = rates(part.time, part[column] || []);
  return hits.map((each, at) => each === null || !asked[at] ? null : 100 * each / asked[at]);
}
function nowhere(part) {
  const all = FOUND.map((column) => found(part, column));
  return all[0].map((each, at) => each === null ? null : Math.max(0, 100 - all.reduce((sum, of) => sum + (of[at] || 0), 0)));
}
const filling = (part, tier) => (part[tier + "_used"] || []).map((used, at) => {
  const limit = part[tier + "_limit"][at];
  return limit ? 100 * used / limit : null;
});
const megabytes = (part, column) => rates(part.time, part[column] || []).map((rate) => rate === null ? null : rate / 1e6);

const times = (plot, places) => {
  const exact = plot.scales.x.max - plot.scales.x.min < 120;
  return places.map((each) => exact ? clock(each) : clock(each).slice(0, 5));
};

function draw(id, chart, part) {
  const box = el(id), series = chart.of(part), data = [part.time, ...series.map(([, , values]) => values)];
  if (charts[id]) { charts[id].setData(data); return; }
  const axis = {stroke: colour("soft"), grid: {stroke: colour("grid"), width: 1}, ticks: {stroke: colour("grid"), width: 1}};
  charts[id] = new uPlot({
    width: box.clientWidth, height: 190,
    cursor: {sync: {key: "kvstore"}},
    scales: {y: {range: (plot, low, high) => [0, chart.top || Math.max(high * 1.1, 0.001)]}},
    axes: [{...axis, space: 70, values: times}, {...axis, size: 54}],
    series: [{value: (plot, value) => value === null ? "–" : clock(value)}, ...series.map(([label, name]) => ({
      label, stroke: colour(name), width: 2, spanGaps: false, dash: DASHES[name],
      value: (plot, value) => value === null ? "–" : value.toFixed(1),
    }))],
  }, data, box);
  const caption = box.closest("figure").querySelector("figcaption").textContent;
  box.querySelector("canvas").ariaHidden = "true";  // its figures are in the legend, and in the tables
  box.querySelector(".u-legend").setAttribute("aria-label", caption);
}

function drawAll() {
  const part = within(samples, seconds());
  for (const [id, chart] of Object.entries(CHARTS)) draw(id, chart, part);
  if (watched) draw("activity", ACTIVITY, watched.samples);
}

function drawAnew() {
  Object.values(charts).forEach((chart) => chart.destroy());
  charts = {};
  if (node) drawAll();
}

function made(kind, text, name) {
  const element = document.createElement(kind);
  if (text !== undefined) element.textContent = escaped(text);
  if (name) element.className = name;
  return element;
}
const cell = (text, kind) => made("td", text, kind);
const number = (text) => cell(text, "number");

function fill(id, rows, columnsWide, nothing) {
  const table = el(id), held = document.activeElement, key = table.contains(held) ? held.dataset.key : undefined;
  const lines = rows.map((cells) => { const row = made("tr"); row.append(...cells); return row; });
  if (!lines.length) {
    const row = made("tr"), none = cell(nothing, "none");
    none.colSpan = columnsWide;
    row.append(none);
    lines.push(row);
  }
  table.querySelector("tbody").replaceChildren(...lines);
  if (key) [...table.querySelectorAll("[data-key]")].find((each) => each.dataset.key === key)?.focus();
}

function showTiers(tiers) {
  el("tiers").replaceChildren(...tiers.map((tier) => {
    const card = made("div", undefined, "tier " + tier.name), name = TIER_NAMES[tier.name] || tier.name;
    const bar = made("progress");
    bar.max = tier.limit || 1;
    bar.value = tier.used;
    bar.setAttribute("aria-label", name + " used");
    const head = made("div", undefined, "bar");
    head.append(made("b", `${name} ${percent(tier.used, tier.limit)}`), made("span", tier.state, "badge " + tier.state));
    card.append(head, bar, made("small", `${bytes(tier.used)} of ${bytes(tier.limit)}, ${count(tier.pages)} pages`));
    const asked = Object.entries(tier.requests).map(([request, times]) => `${count(times)} ${request}`);
    if (asked.length) card.append(made("small", `requests: ${asked.join(", ")}; about ${tier.dollars.toFixed(2)} USD`));
    if (tier.state === "degraded" || tier.state === "down") {
      const since = tier.since ? ` since ${clock(tier.since)} (${duration(Math.max(0, node.time - tier.since))})` : "";
      card.append(made("p", `${tier.state}${since}${tier.reason ? ": " + tier.reason : ""}`, "reason"));
    }
    return card;
  }));
}

function showRanges() {
  el("ranges").replaceChildren(...RANGES.map(([length, label]) => {
    const button = made("button", label);
    button.type = "button";
    button.dataset.key = length;
    button.setAttribute("aria-pressed", String(length === seconds()));
    button.onclick = () => change({range: String(length)});
    return button;
  }));
}

function showHeaders() {
  el("namespaces").querySelector("thead tr").replaceChildren(...COLUMNS.map(([column, label], at) => {
    const head = made("th", undefined, (at ? "number" : "") + (["disk", "redis", "objects", "asked", "idle"].includes(column) ? " extra" : ""));
    const button = made("button", label), sorted = view.sort === column;
    head.scope = "col";
    head.setAttribute("aria-sort", sorted ? (view.order === "asc" ? "ascending" : "descending") : "none");
    button.type = "button";
    button.dataset.key = column;
    button.onclick = () => change(pressed(view, column));
    head.append(button);
    return head;
  }));
}

function showHeadline() {
  const told = headline(samples, seconds());
  el("ratio").textContent = told.ratio;
  el("looked").textContent = told.of;
  el("found").textContent = told.found;
}

function showNamespaces(data) {
  const first = data.namespaces_from + 1, last = data.namespaces_from + data.namespaces.length;
  const known = data.namespaces_known, matching = data.namespaces_matching;
  el("known").textContent = (last >= first ? `${first} to ${last} of ${matching}` : `0 of ${matching}`)
    + (matching < known ? ` that the filter finds, of ${known}` : "");
  el("previous").disabled = data.namespaces_from <= 0;
  el("next").disabled = last >= matching;
  el("previous").onclick = () => change({from: String(Math.max(0, data.namespaces_from - data.namespaces_at_once))});
  el("next").onclick = () => change({from: String(last)});
  fill("namespaces", data.namespaces.map((each) => {
    const others = each.labels.slice(1).join(", ");
    const name = cell(undefined), button = made("button", each.name + (others && ` (also ${others})`), "link");
    button.type = "button";
    button.dataset.key = each.fingerprint;
    button.setAttribute("aria-expanded", String(each.fingerprint === view.namespace));
    button.onclick = () => open(each.fingerprint === view.namespace ? "" : each.fingerprint);
    name.append(button);
    const used = ["arena", "disk", "redis", "objects"].map((tier) => cell(tier in each.used ? bytes(each.used[tier]) : "–", tier === "arena" ? "number" : "number extra"));
    const asked = "looked_up" in each.counters ? count(each.counters.looked_up) : "–";
    return [name, ...used, number(hitRatio(each.counters)), cell(asked, "number extra"), cell(duration(each.idle), "number extra")];
  }), COLUMNS.length, known ? "No namespace has that in its name." : "No engine has opened one yet.");
}

function showNamespace(told) {
  el("namespace").hidden = !view.namespace;
  if (!view.namespace) { watched = null; charts.activity?.destroy(); delete charts.activity; return; }
  if (watched?.fingerprint !== view.namespace) {
    charts.activity?.destroy();
    delete charts.activity;
    watched = {fingerprint: view.namespace, opened: node.time, samples: {time: [], looked_up: [], loaded: [], stored: []}, first: null};
  }
  el("namespace-title").textContent = told ? escaped(told.name) : "This namespace is not there, or not any more.";
  if (!told) { el("details").replaceChildren(); fill("watched", [], 2, ""); return; }
  const c = told.counters, loaded = c.arena + c.disk + c.redis + (c.objects || 0);
  const now = {time: node.time, looked_up: c.looked_up ?? null, loaded, stored: c.stored};
  watched.first = watched.first || {...c, loaded, found: foundIn(c)};
  for (const [name, value] of Object.entries(now)) watched.samples[name] = [...watched.samples[name], value].slice(-MOST_SAMPLES);
  const tiers = Object.entries(told.used).map(([tier, used]) =>
    [TIER_NAMES[tier] || tier, bytes(used) + (told.quota[tier] ? ` of a quota of ${bytes(told.quota[tier])}` : "")]);
  const layout = Object.entries(told.layout).filter(([, value]) => value !== "" && value !== null).map(([name, value]) => [name, typeof value === "object" ? JSON.stringify(value) : value]);
  const facts = [["fingerprint", told.fingerprint], ...(told.labels.length ? [["called", told.labels.join(", ")]] : []), ...layout, ...tiers,
    ["pages in the arena", `${count(told.arena_pages)} of ${bytes(told.page_bytes)}, ${count(told.pinned)} pinned`],
    ["durability", told.durability || "as other pages"],
    ["opened first", duration(told.age) + " ago"], ["unused for", duration(told.idle)],
    ["hit ratio", hitRatio(c) + " since the node started"],
    ["loaded", `${count(loaded)} pages, ${count(c.missed)} missed`],
    ["stored", `${count(c.stored)} pages, ${count(c.present)} were there, ${count(c.refused)} refused`]];
  el("details").replaceChildren(...facts.flatMap(([name, value]) => [made("dt", name), made("dd", value)]));
  const before = watched.first, asked = c.looked_up - before.looked_up, hits = foundIn(c) - before.found;
  fill("watched", [
    [cell("since"), number(clock(watched.opened))],
    [cell("hit ratio"), number(asked > 0 ? percent(hits, asked) : "–")],
    [cell("pages looked up"), number(asked >= 0 ? count(asked) : "–")],
    [cell("pages loaded"), number(count(loaded - before.loaded))],
    [cell("pages stored"), number(count(c.stored - before.stored))],
  ], 2, "");
}

function show(data) {
  el("node").textContent = escaped(`${node.host} · version ${node.version} · pid ${node.pid} · up ${duration(node.uptime)}`);
  document.title = `kvstore ${escaped(node.host)}`;
  showTiers(data.tiers);
  showHeadline();
  fill("latencies", data.latencies.map((each) =>
    [cell(each.name.replace("redis", "Redis")), number(count(each.calls)), ...[each.p50, each.p99].map((value) => number(value === null ? "> " + latency(each.most) : latency(value)))]),
  4, "No calls in this time.");
  showNamespaces(data);
  showNamespace(data.namespace);
  fill("prefixes", data.prefixes.map((each) => [cell(each.last, "hash"), cell(each.namespace), number(count(each.pages)), number(count(each.loads))]),
    4, "Nothing was loaded yet.");
  const peers = data.peers;
  el("clients").textContent = `${plural(peers.clients, "client shares", "clients share")} the arena, ${plural(peers.bulk, "bulk connection", "bulk connections")}`;
  fill("engines", peers.connected.map((each) => [cell(each.name || "(no name)"), cell(each.host ? `${each.way} from ${each.host}` : each.way),
    number(count(each.connections)), number(duration(each.seconds))]), 4, "None is connected.");
  fill("peers", peers.servers.map((each) => [cell(each.name), cell(each.answers ? "answers" : "left alone", each.answers ? "number" : "number error")]),
    2, "None.");
  fill("errors", data.errors.map((each) => [cell(clock(each.time)), cell(each.level, each.level), cell(each.message)]),
    3, "None since the node started.");
  drawAll();
}

function merge(history) {
  for (const [name, values] of Object.entries(history)) samples[name] = (samples[name] || []).concat(values).slice(-MOST_SAMPLES);
}

function tellState() {
  const told = trouble ? `${trouble} since ${clock(answered / 1000)}` : "live";
  if (el("state").textContent !== told) el("state").textContent = told;  // or it is read out again and again
  el("state").className = trouble ? "bad" : "";
  el("main").classList.toggle("stale", trouble !== "");
  tick();
}

function tick() {
  if (!trouble && node && Date.now() - answered > OLD_MS) {  // the browser slept, or forgot its timers
    trouble = "not answering";
    tellState();
    refresh();
  }
  el("waiting").textContent = trouble ? `(${duration((Date.now() - answered) / 1000)})` : "";
}

function tellRestart(before) {
  el("notice").textContent = `The node was restarted at ${clock(node.time - node.uptime)}: pid ${before.pid} was followed by pid ${node.pid}. What it counts began anew.`;
  el("notice").hidden = false;
}

function take(data) {
  const before = node;
  node = data.node;
  answered = Date.now();
  trouble = "";
  if (before && before.instance !== node.instance) {
    const asked = samples.time.length;
    tellRestart(before);
    samples = {time: []};
    watched = null;
    if (asked) return 0;  // what it answered leaves out what it has of before
  }
  merge(data.history);
  show(data);
  return STEP_MS;
}

async function refresh() {
  clearTimeout(next);
  asking?.abort();  // what is wanted now is something else
  const mine = asking = new AbortController(), query = new URLSearchParams({...view, since: samples.time.at(-1) || 0});
  let timedOut = false, status = 0, data = null;
  const limit = setTimeout(() => { timedOut = true; mine.abort(); }, TIMEOUT_MS);
  try {
    const answer = await fetch(`console/data?${query}`, {cache: "no-store", signal: mine.signal});
    if (answer.ok) data = await answer.json();
    else status = answer.status;
  } catch {  // told by what is known then
  } finally {
    clearTimeout(limit);
  }
  if (mine !== asking) return;
  let pause = RETRY_MS;
  try {
    if (data) pause = take(data);
    else trouble = failure(status, timedOut);
    tellState();
  } finally {
    next = setTimeout(refresh, pause);
  }
}

function change(wanted, push) {
  view = {...view, ...wanted};
  window.history[push ? "pushState" : "replaceState"](null, "", fragmentOf(view));
  follow();
}

function open(fingerprint) {
  change({namespace: fingerprint}, true);
  if (fingerprint) { el("namespace").hidden = false; el("namespace-title").focus(); }
}

function follow() {
  const held = document.activeElement?.dataset.key, within = document.activeElement?.closest("#ranges, #namespaces thead")?.id || "namespaces";
  showRanges();
  showHeaders();
  if (el("filter").value !== view.filter) el("filter").value = view.filter;
  if (held) [...el(within).querySelectorAll("[data-key]")].find((each) => each.dataset.key === held)?.focus();
  if (node) { showHeadline(); drawAll(); }
  refresh();
}

el("filter").oninput = () => change({filter: el("filter").value, from: "0"});
el("close").onclick = () => { const was = view.namespace; change({namespace: ""}, true); el("namespace").hidden = true; el("namespaces").querySelector(`[data-key="${was}"]`)?.focus(); };
window.addEventListener("hashchange", () => { view = parseFragment(location.hash); follow(); });
window.addEventListener("resize", drawAnew);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAnew);
document.addEventListener("visibilitychange", () => { if (!document.hidden) refresh(); });
setInterval(tick, 1000);
follow();

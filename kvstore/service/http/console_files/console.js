"use strict";

// Everything that is shown comes from one JSON document, asked for again every few seconds. Text is always set as text.

const STEP_MS = 5000;
const MOST_SAMPLES = 720;
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const el = (id) => document.getElementById(id);

let samples = {time: []};
let instance = "";
let charts = [];

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

const count = (number) => number.toLocaleString("en");
const percent = (part, whole) => whole ? (100 * part / whole).toFixed(1) + " %" : "–";

// A rate a second between each sample and the one before. Counters that went back began anew: no rate.
function rates(values) {
  const times = samples.time;
  return values.map((value, at) => {
    if (!at) return null;
    const seconds = times[at] - times[at - 1], more = value - values[at - 1];
    return seconds > 0 && more >= 0 ? more / seconds : null;
  });
}

function shares(column) {
  const names = ["arena", "disk", "redis", "missed"];
  const all = names.map((name) => rates(samples[name]));
  const own = rates(samples[column]);
  return own.map((rate, at) => {
    const asked = all.reduce((sum, each) => sum + (each[at] || 0), 0);
    return rate === null || !asked ? null : 100 * rate / asked;
  });
}

const filling = (tier) => samples[tier + "_used"].map((used, at) => {
  const limit = samples[tier + "_limit"][at];
  return limit ? 100 * used / limit : null;
});
const megabytes = (column) => rates(samples[column]).map((rate) => rate === null ? null : rate / 1e6);

const TIERS = [["arena", "arena"], ["disk", "disk"], ["Redis", "redis"]];
const CHARTS = [
  {id: "hits", top: 100, series: [...TIERS, ["nowhere", "missed"]].map(([label, name]) => [label, name, () => shares(name)])},
  {id: "throughput", series: [["loaded", "arena", () => megabytes("loaded_bytes")], ["stored", "redis", () => megabytes("stored_bytes")]]},
  {id: "filling", top: 100, series: TIERS.map(([label, name]) => [label, name, () => filling(name)])},
  {id: "leaving", series: [["evicted", "arena", () => rates(samples.evicted)], ["overrun", "bad", () => rates(samples.overrun)], ["refused", "disk", () => rates(samples.refused)]]},
];

function draw() {
  charts.forEach((chart) => chart.destroy());
  charts = CHARTS.map(({id, top, series}) => {
    const axis = {stroke: colour("soft"), grid: {stroke: colour("grid"), width: 1}, ticks: {stroke: colour("grid"), width: 1}};
    const options = {
      width: el(id).clientWidth, height: 190,
      cursor: {sync: {key: "kvstore"}},
      scales: {y: {range: (plot, low, high) => [0, top || Math.max(high * 1.1, 0.001)]}},
      axes: [axis, {...axis, size: 54}],
      series: [{}, ...series.map(([label, name]) => ({
        label, stroke: colour(name), width: 2, spanGaps: false,
        value: (plot, value) => value === null ? "–" : value.toFixed(1),
      }))],
    };
    return new uPlot(options, columns(series), el(id));
  });
}

const columns = (series) => [samples.time, ...series.map(([, , values]) => values())];

function redraw() {
  CHARTS.forEach(({series}, at) => charts[at].setData(columns(series)));
}

function cell(text, kind) {
  const made = document.createElement("td");
  made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

function fill(id, rows, columnsWide, nothing) {
  const body = el(id).querySelector("tbody");
  const made = rows.map((cells) => { const row = document.createElement("tr"); row.append(...cells); return row; });
  if (!made.length) {
    const row = document.createElement("tr"), none = cell(nothing, "none");
    none.colSpan = columnsWide;
    row.append(none);
    made.push(row);
  }
  body.replaceChildren(...made);
}

function showTiers(tiers) {
  el("tiers").replaceChildren(...tiers.map((tier) => {
    const card = document.createElement("div"), name = document.createElement("b");
    const bar = document.createElement("progress"), text = document.createElement("small");
    card.className = "tier " + tier.name;
    name.textContent = (tier.name === "redis" ? "Redis" : tier.name) + " " + percent(tier.used, tier.limit);
    bar.max = tier.limit || 1;
    bar.value = tier.used;
    text.textContent = bytes(tier.used) + " of " + bytes(tier.limit) + ", " + count(tier.pages) + " pages";
    card.append(name, bar, text);
    return card;
  }));
}

function show(data) {
  const node = data.node;
  el("node").textContent = `${node.host} · version ${node.version} · pid ${node.pid} · up ${duration(node.uptime)}`;
  showTiers(data.tiers);
  el("known").textContent = `${data.namespaces.length} largest of ${data.namespaces_known}`;
  fill("namespaces", data.namespaces.map((each) => {
    const c = each.counters, hit = c.arena + c.disk + c.redis;
    const used = ["arena", "disk", "redis"].map((tier) => cell(tier in each.used ? bytes(each.used[tier]) : "–", "number"));
    return [cell(each.name, "name"), ...used, cell(percent(hit, hit + c.missed), "number"),
      cell(count(hit + c.missed), "number"), cell(duration(each.idle), "number")];
  }), 7, "No engine has opened one yet.");
  fill("prefixes", data.prefixes.map((each) =>
    [cell(each.last), cell(each.namespace, "name"), cell(count(each.pages), "number"), cell(count(each.loads), "number")]),
  4, "Nothing was loaded yet.");
  fill("peers", [
    [cell("engines that share the arena"), cell(count(data.peers.clients), "number")],
    [cell("bulk connections"), cell(count(data.peers.bulk), "number")],
    ...data.peers.servers.map((each) => [cell(each.name, "name"), cell(each.answers ? "answers" : "left alone", each.answers ? "number" : "number error")]),
  ], 2, "");
  fill("errors", data.errors.map((each) =>
    [cell(new Date(each.time * 1000).toLocaleTimeString()), cell(each.level, each.level), cell(each.message, "name")]),
  3, "None since the node started.");
}

function merge(data) {
  if (data.node.instance !== instance) samples = {time: []};
  instance = data.node.instance;
  for (const [name, values] of Object.entries(data.history)) {
    samples[name] = (samples[name] || []).concat(values).slice(-MOST_SAMPLES);
  }
}

async function refresh() {
  const state = el("state");
  try {
    const last = samples.time.length ? samples.time[samples.time.length - 1] : 0;
    const answer = await fetch(`console/data?since=${last}`, {cache: "no-store"});
    if (!answer.ok) throw new Error(`the node answers ${answer.status}`);
    const data = await answer.json();
    if (instance && data.node.instance !== instance && last) { samples = {time: []}; instance = ""; setTimeout(refresh, 0); return; }
    merge(data);
    show(data);
    if (charts.length) redraw(); else draw();
    state.textContent = "live";
    state.className = "";
  } catch (error) {
    state.textContent = "no answer: " + error.message;
    state.className = "bad";
  }
  setTimeout(refresh, STEP_MS);
}

window.addEventListener("resize", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
refresh();

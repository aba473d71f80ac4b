"use strict";

// Everything that is shown comes from one JSON document, asked for again every few seconds. Text is always set as text.

const STEP_MS = 5000;
const RETRY_MS = 1000;
const TIMEOUT_MS = 5000;
const el = (id) => document.getElementById(id);
const WORDS = {
  hit: "told what an equal one was told", shared: "told the answer of an equal one under way",
  miss: "nothing equal is kept", old: "what is kept is of a run that has ended, or too old", similar: "of those with nothing equal: told what a similar one was told",
  other_form: "computed: what is kept can't be told in this form", late: "computed: the store was late", failed: "computed: the store failed",
  skipped: "computed: the store is left alone", unreadable: "computed: what is kept is damaged, or of another key",
};
const KEPT = {
  stored: "kept", unfinished: "not kept: not at its own end", too_large: "not kept: too large",
  unknown_run: "not kept: its instance had just come back", skipped: "not kept: the store is left alone", failed: "not kept: the store failed",
};
let answered = Date.now();

function made(kind, text, name) {
  const element = document.createElement(kind);
  if (text !== undefined) element.textContent = escaped(text);
  if (name) element.className = name;
  return element;
}

function fill(id, rows, nothing) {
  const table = el(id), lines = rows.map((cells) => {
    const row = made("tr");
    row.append(...cells.map((each) => made("td", typeof each === "number" ? count(each) : each, typeof each === "number" ? "number" : undefined)));
    return row;
  });
  if (!lines.length) {
    const row = made("tr"), none = made("td", nothing, "none");
    none.colSpan = table.querySelectorAll("th").length;
    row.append(none);
    lines.push(row);
  }
  table.querySelector("tbody").replaceChildren(...lines);
}

const most = (counts) => Object.entries(counts).filter(([, number]) => number).sort(([, left], [, right]) => right - left);
const share = (part) => (100 * part).toFixed(part < 0.1 ? 2 : 1) + " %";

function showSimilar(similar) {
  el("open").textContent = similar === null ? "off" : similar.open ? "open" : "shut";
  el("open").className = "badge " + (similar === null ? "unknown" : similar.open ? "ok" : "down");
  el("why").textContent = similar === null ? "Similar prompts are computed: the proxy has no --responses-similar." : escaped(similar.why);
  el("why").hidden = !el("why").textContent;
  if (similar === null) { el("checks").textContent = el("interval").textContent = ""; return; }
  const {right, wrong, undecided} = similar.shadows;
  el("checks").textContent = `${plural(similar.hits, "hit", "hits")}; ${count(right + wrong)} of them computed as well, of which ${plural(wrong, "was wrong", "were wrong")}`
    + (undecided ? `, and ${count(undecided)} that nobody could tell` : "");
  el("interval").textContent = (right + wrong ? `Wrong: ${share(similar.lower)} to ${share(similar.upper)}, and the bound is ${share(similar.bound)}.`
    : `The bound is ${share(similar.bound)}.`) + ` Comparisons of computed answers: ${count(similar.outcomes.right)} right, ${count(similar.outcomes.wrong)} wrong.`;
}

function show(data) {
  el("node").textContent = escaped(`${data.host} · pid ${data.pid} · up ${duration(data.uptime)}`);
  document.title = `kvstore proxy ${escaped(data.host)}`;
  fill("instances", data.instances.map((each) => [each.url, each.role, each.in_service ? "in service" : "out of service", each.in_flight]), "None.");
  const responses = data.responses;
  if (responses === null) {
    el("told").textContent = "off";
    el("requests").textContent = "Every request is computed: the proxy has no --responses.";
  } else {
    const told = responses.lookups.hit + responses.shared + (responses.similar?.hits || 0);
    const all = Object.values(responses.lookups).reduce((sum, each) => sum + each, 0) + responses.shared;
    const passed = Object.values(responses.passed_by).reduce((sum, each) => sum + each, 0);
    el("told").textContent = percent(told, all);
    el("requests").textContent = `of ${plural(all, "request", "requests")} that may be told one; ${count(passed)} may not`;
    el("saved").textContent = `Saved: ${duration(responses.saved_seconds)} of computing, ${plural(responses.saved_tokens, "token", "tokens")}`;
  }
  showSimilar(responses?.similar ?? null);
  fill("outcomes", responses === null ? [] : [
    ...most({...responses.lookups, shared: responses.shared, similar: responses.similar?.hits || 0}).map(([name, number]) => [WORDS[name] || name, number]),
    ...most(responses.passed_by).map(([name, number]) => [`computed, and not kept: ${name.replaceAll("_", " ")}`, number]),
  ], "None yet.");
  fill("refusals", most(responses?.similar?.refusals || {}), "None.");
  fill("kept", most(responses?.kept || {}).map(([name, number]) => [KEPT[name] || name, number]), "None yet.");
}

async function refresh() {
  const limit = new AbortController(), timer = setTimeout(() => limit.abort(), TIMEOUT_MS);
  let pause = RETRY_MS, trouble = "";
  try {
    const answer = await fetch("console/data", {cache: "no-store", signal: limit.signal});
    if (answer.ok) {
      show(await answer.json());
      answered = Date.now();
      pause = STEP_MS;
    } else trouble = `answers ${answer.status}`;
  } catch {
    trouble = limit.signal.aborted ? "not answering" : "gone";
  }
  clearTimeout(timer);
  const told = trouble ? `${trouble} since ${clock(answered / 1000)}` : "live";
  if (el("state").textContent !== told) el("state").textContent = told;  // or it is read out again and again
  el("state").className = trouble ? "bad" : "";
  el("main").classList.toggle("stale", trouble !== "");
  setTimeout(refresh, pause);
}

refresh();

"use strict";
// Asks the daemon every two seconds and draws what it says. All text from outside becomes text nodes, never markup.

const POLL_MS = 2000, GIVE_UP_MS = 4000, HISTORY_EVERY = 2, IDLE_SECONDS = 60;
const SVG = "http://www.w3.org/2000/svg";
const byId = (id) => document.getElementById(id);

function el(tag, attributes = {}, ...children) {
  const svg = ["svg", "path", "line"].includes(tag);
  const made = svg ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children.filter((child) => child !== null));
  return made;
}

// ---- numbers for people

const none = "–";
const known = (value) => value !== null && value !== undefined;
const percent = (share) => known(share) ? `${(100 * share).toFixed(share > 0.9995 || share < 0.0995 ? 0 : 1)} %` : none;
const number = (value) => !known(value) ? none : value >= 100 ? Math.round(value).toLocaleString("en") : value.toPrecision(3).replace(/\.?0+$/, "");
const ms = (value) => !known(value) ? none : value >= 10000 ? `${number(value / 1000)} s` : `${number(value)} ms`;
const unit = (value, names, base) => {
  let i = 0;
  while (value >= base && i < names.length - 1) { value /= base; i += 1; }
  return `${i ? number(value) : Math.round(value)} ${names[i]}`;
};
const bytes = (value) => known(value) ? unit(value, ["B", "KiB", "MiB", "GiB", "TiB"], 1024) : none;
const rate = (value) => known(value) ? unit(value, ["B/s", "kB/s", "MB/s", "GB/s"], 1000) : none;
const span = (seconds) => {
  if (!known(seconds)) return none;
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return seconds < 129600 ? `${(seconds / 3600).toFixed(1)} h` : `${Math.round(seconds / 86400)} days`;
};

// ---- a chart: lines over the last ten minutes, values under the pointer in the legend

function chart(title, lines, show, top) {
  const values = lines.map(() => el("b"));
  const legend = el("span", { class: "key" }, ...lines.map((line, i) =>
    el("span", { class: line.class }, el("span", { class: "name" }, line.name), values[i])));
  const drawing = el("svg", { class: "chart", viewBox: "0 0 600 100", preserveAspectRatio: "none", role: "img" });
  const peak = el("span"), at = el("span", {}, "now"), left = el("span");
  const figure = el("figure", {}, el("figcaption", {}, title, legend), drawing,
    el("div", { class: "scale" }, left, peak, at));
  let points = [], pick = null, reach = 60;

  const x = (point) => 600 * (1 - point.age / reach);
  const nearest = () => points.reduce((best, p) => Math.abs(x(p) - pick) < Math.abs(x(best) - pick) ? p : best, points[0]);
  function draw() {
    const highest = top || Math.max(0, ...points.flatMap((p) => lines.map((line) => p[line.field] || 0))) || 1;
    const y = (value) => 98 - 94 * Math.min(value / highest, 1);
    left.textContent = `${span(reach)} ago`;
    drawing.replaceChildren(el("line", { x1: 0, x2: 600, y1: 98, y2: 98 }), el("line", { x1: 0, x2: 600, y1: 4, y2: 4 }));
    for (const line of lines) {
      for (const run of runs(points, line.field)) {
        const path = run.map((p, i) => `${i ? "L" : "M"}${x(p).toFixed(1)} ${y(p[line.field]).toFixed(1)}`).join("");
        const ends = [x(run[0]).toFixed(1), x(run[run.length - 1]).toFixed(1)];
        if (lines[0] === line) drawing.append(el("path", { class: `area ${line.class}`, d: `${path}L${ends[1]} 98L${ends[0]} 98Z` }));
        drawing.append(el("path", { class: line.class, d: path }));
      }
    }
    const seen = points.length ? (pick === null ? points[points.length - 1] : nearest()) : null;
    if (pick !== null && seen) drawing.append(el("line", { class: "at", x1: x(seen), x2: x(seen), y1: 0, y2: 100 }));
    lines.forEach((line, i) => { values[i].textContent = ` ${show(seen ? seen[line.field] : null)}`; });
    peak.textContent = points.length ? `maximum: ${show(highest)}` : "no data yet";
    at.textContent = pick !== null && seen ? `${span(seen.age)} ago` : "now";
    drawing.setAttribute("aria-label", `${title}: ${lines.map((line, i) => `${line.name}${values[i].textContent}`).join(", ")}`);
  }
  drawing.addEventListener("pointermove", (event) => {
    const box = drawing.getBoundingClientRect();
    pick = 600 * (event.clientX - box.left) / box.width;
    draw();
  });
  drawing.addEventListener("pointerleave", () => { pick = null; draw(); });
  return { figure, set(next) {
    points = next.filter((p) => p.age <= 600);
    reach = Math.max(60, ...points.map((p) => p.age));  // the first minute fills the chart; then it grows to ten
    draw();
  } };
}

function runs(points, field) {
  const found = [[]];
  for (const point of points) {
    if (known(point[field])) found[found.length - 1].push(point);
    else if (found[found.length - 1].length) found.push([]);
  }
  return found.filter((run) => run.length > 1);
}

const BY_SOURCE = [
  { name: "from cache", class: "compute", field: "cache_bytes_per_second" },
  { name: "from the store", class: "wait", field: "store_bytes_per_second" },
];

// ---- one training job

function jobCard(name) {
  const charts = [
    chart("Goodput", [{ name: "", class: "compute", field: "goodput" }], percent, 1),
    chart("Bytes read", BY_SOURCE, rate),
    chart("Per step", [{ name: "data wait", class: "wait", field: "wait_ms_per_step" },
      { name: "save stall", class: "stall", field: "stall_ms_per_step" }], ms),
  ];
  const about = el("span", { class: "quiet" }), idle = el("span", { class: "warn" });
  const bars = ["compute", "wait", "stall"].map((kind) => el("i", { class: kind }));
  const key = el("p", { class: "key" }), facts = el("dl");
  const card = el("article", { class: "card" },
    el("div", { class: "top" }, el("h3", {}, name), about, idle),
    el("div", { class: "split", "aria-hidden": "true" }, ...bars), key, facts,
    el("div", { class: "charts" }, ...charts.map((one) => one.figure)));

  function set(job, turn) {
    about.textContent = `${job.trainers} ${job.trainers === 1 ? "process" : "processes"}, ${number(job.steps)} steps, ${number(job.samples)} samples`;
    const still = known(job.idle_seconds) && job.idle_seconds > IDLE_SECONDS;
    idle.textContent = !job.trainers ? "ended" : still ? `no batch for ${span(job.idle_seconds)}` : "";
    const parts = [job.compute_ms_per_step, job.wait_ms_per_step, job.stall_ms_per_step].map((part) => part || 0);
    const all = parts.reduce((a, b) => a + b, 0);
    bars.forEach((bar, i) => { bar.style.width = all ? `${100 * parts[i] / all}%` : "0"; });
    const labels = ["computing", "data wait", "save stall"];
    key.replaceChildren(...labels.map((label, i) => el("span", { class: bars[i].className },
      el("span", { class: "name" }, `${label} `), el("b", {}, all ? percent(parts[i] / all) : none))));
    facts.replaceChildren(...[
      ["Goodput", percent(job.goodput)],
      ["Samples", known(job.samples_per_second) ? number(job.samples_per_second) : none, "/s"],
      ["Data wait", ms(job.wait_ms_per_step), "/step"],
      ["Save stall", ms(job.stall_ms_per_step), "/step"],
      ["From cache", rate(job.cache_bytes_per_second)],
      ["From the store", rate(job.store_bytes_per_second)],
      ["Cache hits", percent(job.hit_ratio)],
      ["Queue", number(turn.waiting), turn.connections ? `waiting, ${bytes(turn.bytes_in_flight)} in flight` : "waiting"],
      ["Last committed", known(job.last_step) ? `step ${job.last_step}` : none, known(job.last_step) ? `${span(job.last_commit_age_seconds)} ago` : ""],
    ].map(([term, value, small]) => el("div", {}, el("dt", {}, term), el("dd", {}, `${value} `, el("small", {}, small || "")))));
  }
  return { card, set, history: (points) => charts.forEach((one) => one.set(points)) };
}

// ---- the node

const cacheChart = chart("Bytes of all jobs", [BY_SOURCE[0], { name: "fetched", class: "wait", field: "fetched_bytes_per_second" }], rate);
const cacheFacts = el("dl"), cacheBar = el("i", { class: "compute" }), cacheNote = el("p", { class: "warn" });
const cacheTiers = el("div", { class: "tiers" });
byId("cache").append(el("div", { class: "card" }, cacheNote, el("div", { class: "split" }, cacheBar), cacheFacts, cacheTiers,
  el("div", { class: "charts" }, cacheChart.figure)));

function cacheTier(tier, i, cache) {
  const bar = el("i", { class: "compute" });
  bar.style.width = `${Math.min(100, 100 * tier.used_bytes / (tier.budget_bytes || 1))}%`;
  const hits = known(tier.hit_bytes) ? `, ${bytes(tier.hit_bytes)} hits${cache.asked_bytes ? ` (${percent(tier.hit_bytes / cache.asked_bytes)} of requested bytes)` : ""}` : "";
  return el("div", { class: "save" }, el("div", { class: "top" },
    el("b", {}, `Tier ${i}, ${tier.medium || "directory"}`), el("span", { class: tier.paused ? "warn" : "" }, tier.paused ? "not writable" : tier.directory)),
    el("div", { class: "split" }, bar), el("div", { class: "quiet" }, `${bytes(tier.used_bytes)} of ${bytes(tier.budget_bytes)}${hits}`));
}

function showCache(status) {
  const cache = status.cache || {}, rates = status.rates || {};
  cacheBar.style.width = `${Math.min(100, 100 * (cache.used_bytes || 0) / (cache.budget_bytes || 1))}%`;
  cacheTiers.replaceChildren(...((cache.tiers || []).length > 1 ? cache.tiers : []).map((tier, i) => cacheTier(tier, i, cache)));
  cacheNote.hidden = !cache.paused;
  cacheNote.textContent = cache.paused ? "The disk is not writable: new data is read from the store directly." : "";
  cacheFacts.replaceChildren(...[
    ["Used", bytes(cache.used_bytes), `of ${bytes(cache.budget_bytes)}`],
    ["Files", number(cache.files)],
    ["From cache", rate(rates.cache_bytes_per_second)],
    ["Fetched", rate(rates.fetched_bytes_per_second)],
    ["Cache hits", percent(rates.hit_ratio)],
    ["Queue", number(cache.waiting), "waiting"],
    ["In flight", bytes(cache.in_flight_bytes)],
  ].map(([term, value, small]) => el("div", {}, el("dt", {}, term), el("dd", {}, `${value} `, el("small", {}, small || "")))));
}

const STATES = { waiting: "waits for room", queued: "queued", lost: "waits for its trainer", retrying: "failed, will be tried again", sending: "sending", committing: "sent, committing", committed: "committed", failed: "failed" };

function showSaves(saves) {
  const lines = saves.slice(0, 8).map((save) => {
    const bar = el("i", { class: "stall" });
    bar.style.width = save.total ? `${100 * save.done / save.total}%` : "0";
    const over = save.state === "committed" || save.state === "failed";
    const when = over ? `${span(save.age_seconds)} ago, in ${save.seconds < 10 ? save.seconds.toFixed(1) + " s" : span(save.seconds)}` : `${bytes(save.done)} of ${bytes(save.total)}, ${span(save.seconds)}`;
    return el("div", { class: "save" },
      el("div", { class: "top" }, el("b", {}, save.about), el("span", { class: save.state === "failed" || save.state === "retrying" ? "warn" : "" }, STATES[save.state] || save.state)),
      over ? null : el("div", { class: "split" }, bar),
      el("div", { class: "quiet" }, when), save.error ? el("div", { class: "failed" }, save.error) : null);
  });
  byId("saves").replaceChildren(lines.length ? el("div", { class: "card" }, ...lines)
    : el("p", { class: "empty" }, "No checkpoint has been staged yet."));
}

// ---- the last steps, kept on the node and on its buddy

function onBuddy(step) {
  return known(step.copied) && step.copied >= step.ranks;
}

function copies(step) {
  if (!known(step.copied)) return "";
  return onBuddy(step) ? ", copied to the buddy" : `, ${step.copied} of ${step.ranks} copied to the buddy`;
}

function showTier(tier) {
  byId("tier").hidden = !tier;
  if (!tier) return;
  const bar = el("i", { class: "compute" });
  bar.style.width = `${Math.min(100, 100 * tier.used_bytes / (tier.budget_bytes || 1))}%`;
  const steps = tier.kept.slice(0, 6).map((step) => el("div", { class: "save" }, el("div", { class: "top" },
    el("b", {}, `${step.run}, step ${step.step}`),
    el("span", { class: step.committed ? "" : "warn" }, step.committed ? "committed" : onBuddy(step) ? "on this node and the buddy" : "only on this node")),
    el("div", { class: "quiet" }, `kept ${span(step.age_seconds)} ago, ${step.ranks} of ${step.world_size} ranks${step.guest ? ", for a buddy" : copies(step)}`)));
  const facts = [["Used", bytes(tier.used_bytes), `of ${bytes(tier.budget_bytes)}`]];
  if (tier.medium) facts.push(["In", tier.medium]);
  const buddy = tier.buddy, guests = tier.guests;
  if (buddy) facts.push(["Buddy", buddy.trouble ? "no copies" : "takes copies"], ["Waiting to be copied", number(buddy.waiting)]);
  for (const copy of buddy ? buddy.copies.slice(0, 4) : []) facts.push([`Copy of ${copy.run}`, `step ${copy.step}`, `${span(copy.age_seconds)} old`]);
  if (guests) facts.push(["Guests", number(guests.peers), `connected, ${bytes(guests.received_bytes)} received`]);
  const trouble = [tier.trouble, buddy ? buddy.trouble : ""].filter(Boolean).map((text) => el("p", { class: "warn" }, text));
  byId("tier").replaceChildren(el("h2", {}, "Kept on this node"), el("div", { class: "card" }, ...trouble,
    el("div", { class: "split" }, bar), el("dl", {}, ...facts.map(([term, value, small]) =>
      el("div", {}, el("dt", {}, term), el("dd", {}, `${value} `, el("small", {}, small || ""))))), ...steps));
}

function showErrors(errors) {
  byId("errors").hidden = !errors.length;
  byId("errors").replaceChildren(el("h2", {}, "Recent warnings"), el("ul", {}, ...errors.slice(0, 6).map((error) =>
    el("li", {}, error.text, el("span", { class: "quiet" }, ` – ${span(error.age_seconds)} ago${error.times > 1 ? `, ${error.times} times` : ""}`)))));
}

const cards = new Map();

function showJobs(jobs, fetching) {
  const names = new Set(jobs.map((job) => job.job));
  for (const [name, known] of cards) if (!names.has(name)) { known.card.remove(); cards.delete(name); }
  for (const job of jobs) {
    if (!cards.has(job.job)) {
      cards.set(job.job, jobCard(job.job));
      byId("jobs").append(cards.get(job.job).card);
      cards.get(job.job).history([]);
    }
    cards.get(job.job).set(job, fetching[job.job] || { waiting: 0, connections: 0 });
  }
  byId("no-jobs").hidden = jobs.length > 0;
}

// ---- asking

let answered = null, turn = 0;

async function ask(path) {
  const answer = await fetch(path, { signal: AbortSignal.timeout(GIVE_UP_MS), cache: "no-store" });
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return answer.json();
}

async function refresh() {
  const status = await ask("status.json");
  byId("node").textContent = `process ${status.pid}, up ${span(status.uptime_seconds)}, ${status.clients} ${status.clients === 1 ? "client" : "clients"}`;
  showErrors(status.errors || []);
  showJobs(status.training || [], status.fetching || {});
  showCache(status);
  showSaves(status.saves || []);
  showTier(status.tier);
  if (turn % HISTORY_EVERY === 0) {
    const history = await ask("history.json");
    cacheChart.set(history.node);
    for (const [name, card] of cards) card.history(history.jobs[name] || []);
  }
  turn += 1;
  answered = Date.now();
  say(true, status.draining ? "live, shutting down" : "live");
}

function say(live, text) {
  document.body.className = live ? "live" : "gone";
  byId("live-text").textContent = text;
}

async function run() {
  try {
    await refresh();
  } catch {
    turn = 0;
    const since = answered === null ? "" : `; last heard ${span((Date.now() - answered) / 1000)} ago`;
    say(false, `the sidecar does not answer${since}`);
  }
  setTimeout(run, POLL_MS);
}

run();

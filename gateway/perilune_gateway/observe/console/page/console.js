// The console: state in `pool`, changed by the event stream, drawn at most once per frame.
//
//   /api/stream ──▶ pool ──▶ draw()          /api/health, /api/moves every few seconds
//   a click or Enter ──▶ details of an engine, a decision (/api/decisions/ID) or a session (/api/sessions/ID)
//
// Everything that comes from requests enters the page as text, never as markup.

const $ = (id) => document.getElementById(id);
const KEPT = 100; // decisions in the list
const FEW = 200; // up to so many engines have names on the map
const PAINTED = 250; // engines that one frame draws
const NAMED = 4; // engines named in one problem
const STALE_S = 4;
const MOVE_MS = 2500;

const pool = { about: {}, engines: new Map(), decisions: [], history: [], now: null, rate: 0, newSessions: null, handoffs: [], trying: {}, problems: [], troubled: new Map(), lacks: [], heard: 0, opened: Date.now() };
const tiles = new Map(); // address → its button on the map
const names = new Map(); // address → how the page calls the engine
const dirty = { engines: new Set(), layout: false, decisions: false, history: false, problems: false };
let paused = false;

// -- small helpers ------------------------------------------------------------------------------------------

function make(name, properties = {}, ...children) {
  const element = Object.assign(document.createElement(name), properties);
  element.append(...children);
  return element;
}
function svg(name, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}
function refill(box, ...children) { // the focus stays on the button that means the same
  const key = (e) => JSON.stringify({ ...e.dataset }), focused = box.contains(document.activeElement) && key(document.activeElement);
  box.replaceChildren(...children);
  if (focused) [...box.querySelectorAll("button")].find((b) => key(b) === focused)?.focus({ preventScroll: true });
}
const share = (x) => (x == null ? "–" : `${Math.round(100 * x)} %`);
const seconds = (s) => (s == null ? "–" : s < 0.1 ? `${Math.round(1000 * s)} ms` : s < 10 ? `${s.toFixed(1)} s` : `${Math.round(s)} s`);
const count = (n) => (n == null ? "–" : n.toLocaleString("en"));
const plural = (n, word) => `${count(n)} ${word}${n === 1 ? "" : "s"}`;
const minutes = (s) => (s < 90 ? plural(Math.round(s), "second") : `${Math.round(s / 60)} minutes`);
const engineName = (address) => names.get(address) ?? address;
const { compare } = new Intl.Collator("en", { numeric: true }); // one for all: a thousand engines are compared ten thousand times
const byPlace = (a, b) => compare(a.spine, b.spine) || compare(a.rack, b.rack) || compare(a.node, b.node) || compare(a.address, b.address);

// -- the stream ---------------------------------------------------------------------------------------------

function listen() {
  const source = new EventSource("api/stream");
  source.addEventListener("error", () => { // the browser itself tries again after a cut, not after a refusal
    if (source.readyState === EventSource.CLOSED) setTimeout(listen, 3000);
  });
  const on = (name, take) => source.addEventListener(name, (event) => { pool.heard = Date.now(); take(JSON.parse(event.data)); plan(); });
  on("hello", (data) => {
    pool.about = data;
    pool.history = data.history;
    pool.now = data.history.at(-1);
    pool.engines = new Map(data.endpoints.map((row) => [row.address, row]));
    pool.decisions = data.decisions;
    pool.newSessions = data.new_sessions;
    pool.handoffs = data.handoffs;
    pool.trying = data.trying ?? {};
    dirty.layout = dirty.history = dirty.decisions = true;
  });
  on("state", (data) => {
    let changed = data.left.length > 0;
    for (const row of data.endpoints) {
      changed ||= pool.engines.get(row.address)?.condition !== row.condition;
      dirty.layout ||= moved(row);
      pool.engines.set(row.address, row);
      dirty.engines.add(row.address);
    }
    for (const address of data.left) { pool.engines.delete(address); dirty.layout = true; }
    if (changed) health().catch(() => {}); // what is wrong is told at once
    pool.now = data.now;
    pool.rate = data.decided / pool.about.tick_s;
    pool.newSessions = data.new_sessions;
    pool.handoffs = data.handoffs;
    pool.trying = data.trying ?? {};
    if (data.decided) remember(data.decisions);
    dirty.decisions = dirty.history = true;
  });
  on("point", (point) => {
    pool.history.push(point);
    while (pool.history.length > pool.about.history_s / pool.about.point_s) pool.history.shift();
    dirty.history = true;
  });
}
function moved(row) { // to another place, or new
  const before = pool.engines.get(row.address);
  return !before || before.spine !== row.spine || before.rack !== row.rack || before.node !== row.node;
}
function remember(newest) {
  pool.decisions = [...newest, ...pool.decisions].slice(0, KEPT);
  for (const { target, moved_from } of newest.slice(0, 20)) {
    tiles.get(target)?.animate([{ boxShadow: "inset 0 0 0 2px var(--good)" }, { boxShadow: "none" }], 800);
    if (moved_from) drawMove(moved_from, target);
  }
}

// -- drawing ------------------------------------------------------------------------------------------------

let planned = false;
function plan() {
  if (planned) return;
  planned = true;
  requestAnimationFrame(() => { planned = false; draw(); });
}
function draw() { // a large pool in steps, so that no reader waits
  if (!pool.now) return;
  if (dirty.layout) {
    layOut();
    dirty.layout = false;
    if (tiles.size > FEW) return plan();
  }
  const some = [...dirty.engines].slice(0, PAINTED);
  for (const address of some) { paint(address); dirty.engines.delete(address); }
  if (dirty.engines.size) return plan();
  if (dirty.decisions && !paused) list();
  if (dirty.history) chart();
  if (dirty.problems) tellProblems();
  handOver();
  tryOut();
  head();
  dirty.history = dirty.problems = false;
  dirty.decisions &&= paused;
}
function head() {
  const { about } = pool, engines = [...pool.engines.values()];
  $("pool").textContent = about.pool ?? "";
  $("about").textContent = about.model ? `${about.model} · policy ${about.policy} · ${about.version}` : "";
  const numbers = {
    "engines ready": `${engines.filter((e) => e.condition === "ready").length} of ${engines.length}`,
    "sessions": count(engines.reduce((sum, e) => sum + e.sessions, 0)),
    "in flight": count(pool.now.in_flight),
    "requests/s": pool.now.requests_per_s.toFixed(1),
    "predicted hits": share(points().findLast((p) => p.hit_ratio != null)?.hit_ratio),
    "longest queue": seconds(pool.now.queue_s),
  };
  const sessions = pool.newSessions;
  if (sessions) numbers["new sessions"] = `${count(sessions.waiting)} waiting, ${count(sessions.begun)} begun, ${count(sessions.refused)} refused`;
  $("numbers").replaceChildren(...Object.entries(numbers).map(([name, value]) => make("div", {}, make("dt", { textContent: name }), make("dd", { textContent: value }))));
}
function layOut() {
  const engines = [...pool.engines.values()].sort(byPlace), spines = new Map();
  tiles.clear();
  nameEngines(engines);
  for (const engine of engines) {
    const racks = spines.get(engine.spine) ?? spines.set(engine.spine, new Map()).get(engine.spine);
    const rack = racks.get(engine.rack) ?? racks.set(engine.rack, []).get(engine.rack);
    rack.push(tile(engine));
  }
  const box = (kind, name, size, inside) => {
    const made = make("div", { className: kind }, make("div", { className: "place", textContent: name, hidden: !name }), make("div", {}, ...inside));
    made.style.setProperty("--size", Math.min(size, 4));
    return made;
  };
  const widest = (racks) => [...racks.values()].reduce((sum, inside) => sum + inside.length, 0);
  $("fabric").classList.toggle("many", engines.length > FEW);
  refill($("fabric"), ...[...spines].map(([spine, racks]) => box("spine", spine, widest(racks), [...racks].map(([rack, inside]) => box("rack", rack, inside.length, inside)))));
  for (const address of tiles.keys()) dirty.engines.add(address);
  const first = tiles.values().next().value;
  if (first) first.tabIndex = 0;
  dirty.problems = true;
  if (!engines.length) $("fabric").replaceChildren(make("p", { className: "quiet", textContent: "The pool has no engines." }));
}
function nameEngines(engines) { // by node and port, where that names one engine; else by address
  const short = (e) => (e.node ? `${e.node} :${e.address.split(":").pop()}` : e.address), seen = new Map();
  for (const e of engines) seen.set(short(e), (seen.get(short(e)) ?? 0) + 1);
  names.clear();
  for (const e of engines) names.set(e.address, seen.get(short(e)) === 1 ? short(e) : e.address);
}
function tile(engine) {
  const words = pool.engines.size > FEW ? [] : [make("b"), make("span"), make("span"), make("span")]; // else too small for words
  const button = make("button", { type: "button", className: "engine", tabIndex: -1 }, make("i", { className: "queue" }), make("i", { className: "kv" }), ...words);
  button.dataset.address = engine.address;
  button.ariaLabel = engine.address;
  tiles.set(engine.address, button);
  return button;
}
function paint(address) {
  const engine = pool.engines.get(address), button = tiles.get(address);
  if (!engine || !button) return;
  const [queue, kv, name, work, load, state] = button.children, problem = problemsOf(address)[0];
  queue.style.transform = `scaleX(${Math.min(1, engine.queue_s / 10)})`;
  kv.style.transform = `scaleX(${engine.kv_usage})`;
  button.dataset.condition = engine.condition;
  button.toggleAttribute("data-problem", Boolean(problem));
  if (!name) return;
  name.textContent = engineName(address);
  work.textContent = `${plural(engine.sessions, "session")}, ${count(engine.in_flight)} in flight`;
  load.textContent = `queue ${seconds(engine.queue_s)}, KV ${share(engine.kv_usage)}`;
  state.textContent = engine.condition !== "ready" ? engine.condition : problem ? problem.kind.replaceAll("_", " ") : `hits ${share(engine.hit_ratio)}`;
}
const problemsOf = (address) => pool.troubled.get(address) ?? [];
function describe(button) { // when it is looked at
  const engine = pool.engines.get(button.dataset.address);
  if (engine) button.title = button.ariaLabel = `${engineName(engine.address)}, ${engine.condition}: ${plural(engine.sessions, "session")}, ${engine.in_flight} in flight, queue ${seconds(engine.queue_s)}, KV ${share(engine.kv_usage)}, hits ${share(engine.hit_ratio)}`;
}
function list() {
  const wanted = $("filter").value.trim();
  const shown = pool.decisions.filter((d) => !wanted || d.session_id.includes(wanted));
  $("columns").classList.toggle("fresh", !pool.decisions.length);
  refill($("decisions"), ...(shown.length ? shown.map(row) : [make("li", { className: "quiet", textContent: wanted ? `No kept decision of a session like ${wanted}.` : "No decision yet." })]));
  $("rate").textContent = pool.rate > pool.decisions.length ? `(a part of ${count(Math.round(pool.rate))} per second)` : "";
}
function row(decision) {
  const to = decision.target ? engineName(decision.target) : `refused: ${decision.reason}`;
  const button = make("button", { type: "button", className: decision.target ? (decision.moved_from ? "moved" : "") : "refused" },
    make("span", { textContent: `${decision.session_id || "no session"} → ${to}` }),
    make("span", { textContent: decision.target ? `${share(decision.hit_ratio)} of ${count(decision.prompt_tokens)}` : "" }),
    make("span", { className: "why", textContent: decision.sentence.replace(`${decision.target} because`, "because") }));
  button.dataset.request = decision.request_id;
  return make("li", {}, button);
}
const CHARTS = [["requests/s", (p) => p.requests_per_s, (v) => v.toFixed(1)], ["in flight", (p) => p.in_flight, count], ["longest queue", (p) => p.queue_s, seconds], ["KV in use", (p) => p.kv_usage, share, 1], ["predicted hits", (p) => p.hit_ratio, share, 1], ["moves", (p) => p.moves, count], ["refusals/s", (p) => p.refusals_per_s, (v) => v.toFixed(1)], ["new sessions waiting", (p) => p.waiting, count]];
const points = () => [...pool.history.filter((p) => p.at < pool.now.at), pool.now]; // the last one is what tiles and head show
function chart() { // as far back as the gateway tells, over the whole width
  const known = points(), past = known.length > 1 ? known : [{ ...pool.now, at: pool.now.at - 1 }, pool.now], began = past[0].at, lasts = pool.now.at - began;
  $("history-title").textContent = `Last ${minutes(lasts)}`;
  const shown = CHARTS.filter(([name]) => pool.newSessions || name !== "new sessions waiting");
  $("charts").replaceChildren(...shown.map(([name, read, write, top]) => {
    const values = past.map(read), most = top ?? (Math.max(...values) || 1), runs = [];
    values.forEach((v, i) => {
      if (v == null) return;
      if (values[i - 1] == null) runs.push([]);
      runs.at(-1).push(`${past[i].at - began},${60 - (42 * v) / most}`);
    });
    const drawn = svg("svg", { viewBox: `0 0 ${lasts} 62`, preserveAspectRatio: "none", role: "img", "aria-label": `${name} over time` });
    drawn.append(svg("path", { class: "area", d: runs.map((run) => `M${run[0].split(",")[0]},62L${run.join("L")}V62Z`).join("") }), svg("path", { d: runs.map((run) => `M${run.join("L")}h0`).join("") }));
    const now = values.findLast((v) => v != null), told = runs.length ? { textContent: `up to ${write(top ?? Math.max(...values))}` } : { className: "none", textContent: "no prompts yet" };
    return make("figure", {}, make("figcaption", {}, make("span", { textContent: name }), make("b", { textContent: now == null ? "–" : write(now) })), make("small", told), drawn);
  }));
}
function way(source, target, base = $("moves-drawn").getBoundingClientRect()) { // from tile to tile on the map, as a path
  const [a, b] = [tiles.get(source), tiles.get(target)];
  if (!a || !b) return null;
  const at = (e) => { const r = e.getBoundingClientRect(); return [r.x + r.width / 2 - base.x, r.y - base.y]; };
  const [[x, y], [u, v]] = [at(a), at(b)];
  return `M${x},${y}Q${(x + u) / 2},${Math.min(y, v) - 68} ${u},${v}`;
}
const named = (h) => h.session_id ?? `prefix ${h.prefix}`;
const progress = (h) => (h.stage === "copying" ? `copying, ${share(h.copied)} of ${plural(h.tokens, "token")}` : h.stage);
let handoffsTold = "";
function handOver() { // the KV on its way: dashed from source to target, solid as far as it is copied
  const before = new Map([...$("handoffs-drawn").children].map((g) => [g.dataset.way, g]));
  const ways = pool.handoffs.map((h) => way(h.source, h.target)); // all are measured before anything is drawn
  for (const [i, h] of pool.handoffs.entries()) {
    const d = ways[i], key = `${named(h)} ${h.tenant} ${h.source} ${h.target}`;
    if (!d) continue;
    const group = before.get(key) ?? svg("g", { "data-way": key });
    before.delete(key);
    if (!group.isConnected) { group.append(svg("path", {}), svg("path", { class: "copied", pathLength: 1 })); $("handoffs-drawn").append(group); }
    for (const path of group.children) path.setAttribute("d", d);
    group.lastChild.style.strokeDasharray = `${h.copied} 1`;
  }
  for (const gone of before.values()) gone.remove();
  const told = JSON.stringify(pool.handoffs);
  if (told === handoffsTold) return;
  handoffsTold = told;
  const rows = pool.handoffs.map((h) => {
    const what = h.session_id == null ? named(h) : make("button", { type: "button", textContent: named(h) });
    if (h.session_id != null) what.dataset.session = h.session_id;
    return [what, `${engineName(h.source)} → ${engineName(h.target)}`, h.reason, progress(h)];
  });
  refill($("handoffs"), ...(rows.length ? [table(["KV on its way", "way", "why", "stage"], rows)] : []));
}
const sign = (x, write) => (x == null ? "–" : `${x < 0 ? "−" : "+"}${write(Math.abs(x))}`);
function tryOut() { // shadow policies, and the canary beside the pool's policy
  const { shadow, canary } = pool.trying;
  $("trying-box").hidden = !shadow && !canary;
  $("canary-told").textContent = canary ? `Canary ${canary.policy}: ${canary.state}, ${canary.reason}; ${share(canary.share)} of the sessions.` : "";
  const arms = canary ? Object.entries(canary.arms) : [];
  const arm = ([name, a]) => [name, count(a.requests), seconds(a.ttft_s), seconds(a.tpot_s), share(a.hit_ratio), share(a.requests ? a.failed / a.requests : null)];
  $("canary").replaceChildren(...(canary ? [table(["arm", "requests", "TTFT", "TPOT", "hits", "failed"], arms.map(arm))] : []));
  const row = (p) => [p.off ? `${p.policy}, off: ${p.off}` : p.policy, count(Object.values(p.decisions).reduce((sum, n) => sum + n, 0)), share(p.agreement), sign(p.regret_s, seconds), `${share(p.hit_ratio)}, decided ${share(p.decided_hit_ratio)}`];
  $("shadow").replaceChildren(...(shadow ? [table(["shadow policy", "judged", "agrees", "regret", "predicted hits"], shadow.policies.map(row))] : []));
  $("shadow-told").textContent = shadow ? `Judging takes ${shadow.cpu.used.toFixed(3)} of ${shadow.cpu.budget} cores.` : "";
}
function drawMove(source, target) {
  const d = way(source, target), layer = $("moves-drawn");
  if (!d || layer.childElementCount > 40) return;
  const path = svg("path", { d });
  layer.append(path);
  path.animate([{ opacity: 1, strokeDashoffset: 60 }, { opacity: 0, strokeDashoffset: 0 }], { duration: MOVE_MS }).finished.finally(() => path.remove());
}

// -- pages that are asked -----------------------------------------------------------------------------------

async function page(path) {
  const answer = await fetch(path);
  const value = await answer.json();
  if (!answer.ok && !value.status) throw new Error(value.error?.message ?? answer.statusText);
  return value;
}
async function health() {
  const { status, problems, lacks, renderings = [], media = [] } = await page("api/health");
  const word = status === "ok" && lacks.some((l) => !l.exact) ? "not exact" : status;
  $("health").textContent = word;
  $("health").className = `pill ${word === "ok" ? "good" : word === "unready" ? "bad" : "warn"}`;
  document.title = `${word === "ok" ? "" : `${word}: `}${pool.about.pool ?? ""} Perilune`;
  const told = JSON.stringify([problems.map((p) => [p.kind, p.endpoint, p.message]), lacks]);
  if (told !== problemsTold) {
    [problemsTold, pool.problems, pool.lacks, dirty.problems] = [told, problems, lacks, true];
    pool.troubled = Map.groupBy(problems, (p) => p.endpoint);
    for (const address of tiles.keys()) dirty.engines.add(address);
  }
  const differs = (r) => (r.part ? `${r.part.replaceAll("_", " ")}, from token ${count(r.at)} on` : "");
  const kind = (r) => [r.api, r.tools ? "yes" : "no", r.thinking, `${count(r.equal)} of ${count(r.equal + r.different.length)}${r.untold ? `, ${count(r.untold)} untold` : ""}`, differs(r), r.proof, r.asks_engine ? "an engine" : "here"];
  $("tokens-box").hidden = !renderings.length;
  $("tokens").replaceChildren(...(renderings.length ? [table(["API", "tools", "thinking", "engines equal", "differs", "proof", "tokenized by"], renderings.map(kind))] : []));
  $("media-box").hidden = !media.length;
  $("media").replaceChildren(...(media.length ? [table(["what", "parts of prompts", "name known", "why"], media.map((m) => [m.kind, count(m.parts), m.has_name ? "yes" : "no", m.says]))] : []));
  plan();
}
let problemsTold = "";
function tellProblems() { // engines with the same trouble together
  const { problems, lacks } = pool;
  $("problems-box").hidden = !problems.length && !lacks.length;
  const groups = Map.groupBy(problems, (p) => `${p.kind} ${p.cause}`);
  const wrong = groups.size || lacks.some((l) => !l.exact);
  $("problems-title").textContent = `${wrong ? "What is wrong" : "What could be better"} (${count(groups.size + lacks.length)})`;
  refill($("problems"),
    ...[...groups.values()].map((group) => {
      const [{ kind, message, effect, cause, cure }] = group, engines = group.map((p) => p.endpoint).filter(Boolean);
      return trouble(engines, engines.length > 1 ? "" : message, kind, { Effect: effect, Cause: cause, Cure: cure });
    }),
    ...lacks.map((l) => trouble(l.endpoints, "", l.finding, { Costs: l.costs, Cure: l.cure })),
  );
}
function trouble(engines, what, kind, words) {
  const button = (address) => { const b = make("button", { type: "button", textContent: engineName(address), title: address }); b.dataset.address = address; return b; };
  const more = engines.length > NAMED ? ` and ${count(engines.length - NAMED)} more` : "";
  const title = make("div", { className: "what" }, ...engines.slice(0, NAMED).map(button), more, make("b", { textContent: what }), make("code", { textContent: kind }));
  return make("li", {}, title, facts(words));
}
async function moves() {
  const { budget, offers, ended } = await page("api/moves");
  const shown = (flight) => pool.handoffs.some((h) => h.source === flight.source && h.target === flight.target);
  for (const flight of budget.in_flight) if (!shown(flight)) drawMove(flight.source, flight.target);
  const rows = [...offers.map((m) => ({ ...m, state: "offered" })), ...ended].slice(0, 12);
  const cells = (m) => [named(m), `${engineName(m.source)} → ${engineName(m.target)}`, m.reason, m.lapse ? `${m.state}: ${m.lapse}` : m.state, m.seconds == null ? "" : seconds(m.seconds)];
  $("moves").replaceChildren(rows.length ? table(["what", "way", "why", "outcome", "time"], rows.map(cells)) : make("p", { className: "quiet", textContent: budget.moves_left == null ? "No planned move yet." : `No planned move yet; ${plural(budget.moves_left, "move")} may start within a minute.` }));
}
function table(titles, rows, chosen = -1) {
  const number = (v) => typeof v === "string" && /^[–\d][\d.,]*( ?(%|s|ms))?$/.test(v);
  return make("table", {}, make("thead", {}, make("tr", {}, ...titles.map((t) => make("th", { textContent: t })))),
    make("tbody", {}, ...rows.map((r, i) => make("tr", { className: i === chosen ? "chosen" : "" }, ...r.map((v) => (v instanceof Node ? make("td", {}, v) : make("td", { textContent: v ?? "–", className: number(v) ? "number" : "" })))))));
}

// -- details ------------------------------------------------------------------------------------------------

function open(title, ...body) {
  $("details-title").textContent = title;
  $("details-body").replaceChildren(...body);
  if (!$("details").open) $("details").showModal();
}
const facts = (pairs) => make("table", { className: "facts" }, make("tbody", {}, ...Object.entries(pairs).map(([name, value]) => make("tr", {}, make("td", { textContent: name }), make("td", {}, value)))));
function openEngine(address) {
  const e = pool.engines.get(address);
  if (!e) return open(`Engine ${address}`, make("p", { textContent: "It is not in the pool any more." }));
  const near = pool.decisions.filter((d) => d.target === address || d.moved_from === address).slice(0, 12);
  const wrong = problemsOf(address).map((p) => make("div", { className: "wrong" }, make("b", { textContent: p.message }), facts({ Effect: p.effect, Cause: p.cause, Cure: p.cure })));
  open(`Engine ${address}`, ...wrong, facts({ condition: e.condition, place: [e.spine, e.rack, e.node].filter(Boolean).join(" / ") || "not known", sessions: count(e.sessions), "in flight": count(e.in_flight), "waiting in the engine": count(e.waiting), "queue of prefill": seconds(e.queue_s), "KV in use": share(e.kv_usage), "hit ratio of the engine": share(e.hit_ratio) }),
    make("h3", { textContent: "Latest decisions" }), near.length ? make("ol", {}, ...near.map(row)) : make("p", { className: "quiet", textContent: "None of the latest." }));
}
async function openDecision(id) {
  open(`Decision ${id}`, make("p", { textContent: "…" }));
  try {
    const d = await page(`api/decisions/${encodeURIComponent(id)}`);
    const session = d.session_id ? make("button", { type: "button", textContent: d.session_id }) : "none";
    if (d.session_id) session.dataset.session = d.session_id;
    const terms = (c) => Object.entries(c.terms ?? {}).map(([k, v]) => `${k} ${Number(v.toFixed(3))}`).join(", ");
    const candidates = d.candidates.map((c) => [engineName(c.address), c.cost == null ? "–" : c.cost.toFixed(3), seconds(c.estimated_s), terms(c)]);
    const prefills = d.prefill_costs.map((c) => [engineName(c.address), c.cost.toFixed(3), terms(c)]);
    const others = Object.entries(d.counterfactual).map(([name, o]) => [name, o.needs_body ? "needs the body" : o.refused ? `refuses: ${o.refused}` : o.failed ? `fails: ${o.failed}` : o.target ? engineName(o.target) : "–", o.same ? "same" : ""]);
    open(`Decision ${id}`, make("p", { textContent: d.message || d.sentence }),
      facts({ session, policy: d.policy, reason: d.reason, "decided from": d.phase, "prompt tokens": count(d.prompt_tokens), "predicted cached": count(d.cached_tokens), ending: d.ending ? `${d.ending.outcome}, ${d.ending.status ? `status ${d.ending.status}, ` : ""}${seconds(d.ending.duration_s)}` : "still running" }),
      make("h3", { textContent: "Candidates" }), table(["engine", "cost", "first token", "terms"], candidates, d.candidates.findIndex((c) => c.chosen)),
      ...(prefills.length ? [make("h3", { textContent: "Where the prompt can be prefilled" }), table(["engine", "seconds", "terms"], prefills, d.prefill_costs.findIndex((c) => c.address === (d.prefill || d.target)))] : []),
      make("h3", { textContent: "What other policies would have done" }), table(["policy", "engine", ""], others));
  } catch (error) { open(`Decision ${id}`, make("p", { className: "bad", textContent: error.message })); }
}
async function openSession(id) {
  try {
    const { tenants } = await page(`api/sessions/${encodeURIComponent(id)}`);
    open(`Session ${id}`, ...tenants.map((t) => facts({ tenant: t.tenant || "none", host: t.host ? engineName(t.host) : "none", turns: count(t.turns), "context tokens": count(t.context_tokens), moves: count(t.moves), "idle for": seconds(t.idle_s) })));
  } catch (error) { open(`Session ${id}`, make("p", { className: "bad", textContent: error.message })); }
}

// -- hands ---------------------------------------------------------------------------------------------------

document.addEventListener("click", (event) => {
  const { address, request, session } = event.target.closest("button")?.dataset ?? {};
  if (address) openEngine(address);
  else if (request) openDecision(request);
  else if (session) openSession(session);
});
$("details").addEventListener("click", (event) => { if (event.target === $("details")) $("details").close(); });
$("health").addEventListener("click", () => scrollTo({ top: 0, behavior: "smooth" }));
$("pause").addEventListener("click", () => { paused = !paused; $("pause").ariaPressed = String(paused); $("pause").textContent = paused ? "Go on" : "Pause"; plan(); });
$("filter").addEventListener("input", () => { dirty.decisions = true; const was = paused; paused = false; draw(); paused = was; });
for (const look of ["focusin", "mouseover"]) $("fabric").addEventListener(look, (event) => { if (event.target.closest(".engine")) describe(event.target.closest(".engine")); });
$("fabric").addEventListener("scroll", plan);
addEventListener("resize", plan);
const WALK = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && !(event.target instanceof HTMLInputElement)) { event.preventDefault(); $("filter").focus(); return; }
  const step = WALK[event.key], here = event.target.closest?.(".engine, #decisions button");
  if (!step || !here) return;
  event.preventDefault();
  const all = [...(here.matches(".engine") ? $("fabric").querySelectorAll(".engine") : $("decisions").querySelectorAll("button"))];
  const next = all[all.indexOf(here) + step];
  if (next) { if (here.matches(".engine")) { here.tabIndex = -1; next.tabIndex = 0; } next.focus(); }
});

// -- time ----------------------------------------------------------------------------------------------------

function watchAge() {
  const age_s = (Date.now() - (pool.heard || pool.opened)) / 1000, stale = age_s > STALE_S;
  document.body.classList.toggle("is-stale", stale);
  $("stale").hidden = !stale;
  if (stale) $("stale").textContent = pool.heard ? `Nothing heard from the gateway for ${Math.round(age_s)} s: what you see is old. Trying again …` : "The gateway does not answer. Trying …";
}
async function every(ms, ask) {
  for (;;) {
    if (!document.hidden) await ask().catch(() => {}); // the stale banner tells
    await new Promise((resolve) => setTimeout(resolve, ms));
  }
}
listen();
setInterval(watchAge, 500);
every(5000, health);
every(2000, moves);

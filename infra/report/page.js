"use strict";
// What a model wrote reaches the page through textContent alone. No markup is made of it, here or in the libraries.

const report = JSON.parse(document.getElementById("data").textContent);
const { rows, groups, turns, texts, policies, strips, words } = report;
const COUNT = rows.status.length;
const [ROLE, GENERATED, LENGTH, TEXT, FINISH, POLICY, ENV_REWARD, TOOL_CALLS] = [0, 1, 2, 3, 4, 5, 6, 7];
const RANGES = ["reward", "length", "advantage"];
const BINS = 40;
const MODES = {
  text: { label: "text" },
  rollout_logprobs: { label: "log-prob" },
  values: { label: "value" },
  token_advantages: { label: "advantage" },
  mask: { label: "mask" },
  gap: { label: "engine gap" },
};
// Control characters, marks that change the direction of text, and halves of characters are shown as escapes.
const UNSEEN =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;

const byId = (id) => document.getElementById(id);
const shown = (text) => text.replace(UNSEEN, (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`);
const number = (value, digits = 3) => (value === null || value === undefined ? "–" : value.toFixed(digits).replace("-", "−"));
const plural = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
const idOf = (row) => groups.root[rows.group[row]] + rows.branch[row];
const whole = (cut) => (Array.isArray(cut) ? `${cut[0]} … ${cut[2]}` : cut);
const interned = (name, row) => (rows[name].at[row] === null ? null : rows[name].texts[rows[name].at[row]]);

function element(tag, { text, children = [], ...properties } = {}) {
  const made = Object.assign(document.createElement(tag), properties);
  if (text !== undefined) made.textContent = shown(String(text));
  made.append(...children);
  return made;
}

/* A text, or [beginning, how many characters are left out, end]. */
function written(cut) {
  if (!Array.isArray(cut)) return [document.createTextNode(shown(cut))];
  const gone = element("span", { className: "gone", text: ` … ${plural(cut[1], "character")} left out … ` });
  return [document.createTextNode(shown(cut[0])), gone, document.createTextNode(shown(cut[2]))];
}

function facts(pairs) {
  const made = pairs
    .filter(([, value]) => value !== null && value !== undefined && value !== "")
    .map(([name, value]) =>
      element("div", {
        children: [element("dt", { text: name }), element("dd", { children: Array.isArray(value) ? written(value) : [shown(String(value))] })],
      }),
    );
  return element("dl", { className: "facts", children: made });
}

/* ---------- the table and what it is filtered by ---------- */

const filters = { search: "", status: "", group: "", ...Object.fromEntries(RANGES.map((name) => [name, [null, null]])) };
const lowered = texts.map(() => null); // made when they are first searched

function has(row, search) {
  if (idOf(row).toLowerCase().includes(search)) return true;
  return turns[row].some((turn) => {
    lowered[turn[TEXT]] ??= whole(texts[turn[TEXT]]).toLowerCase();
    return lowered[turn[TEXT]].includes(search);
  });
}

function kept(data) {
  const row = data.row;
  const within = ([from, to], value) =>
    (from === null && to === null) || (value !== null && (from === null || value >= from) && (to === null || value <= to));
  return (
    RANGES.every((name) => within(filters[name], rows[name][row])) &&
    (!filters.status || rows.status[row] === filters.status) &&
    (!filters.group || groups.root[rows.group[row]].toLowerCase().includes(filters.group)) &&
    (!filters.search || has(row, filters.search))
  );
}

/* The end of what was said last, without the token that ends a turn. */
function answer(row) {
  const last = turns[row].findLast((turn) => turn[GENERATED]);
  return last ? whole(texts[last[TEXT]]).slice(-200).replace(/(<\|[^|<>]*\|>|<\/s>)\s*$/, "").slice(-100).replace(/\s+/g, " ") : "";
}

const cell = (format) => (found) => element("span", { text: format(found.getValue()) });
const emptyLast = (a, b, rowA, rowB, column, direction) => {
  if (a === null || b === null) return (a === null) - (b === null) === 0 ? 0 : ((a === null) === (direction === "asc") ? 1 : -1);
  return a - b;
};

function columns() {
  const figure = { hozAlign: "right", sorter: emptyLast, headerSortStartingDir: "desc" };
  const status = (found) => {
    if (found.getValue() !== "ok") found.getElement().classList.add("odd-one");
    return element("span", { text: found.getValue() });
  };
  return [
    { title: "trajectory", field: "id", widthGrow: 5, minWidth: 110, formatter: cell(String) },
    { title: "status", field: "status", width: 76, formatter: status },
    { title: "reward", field: "reward", width: 72, formatter: cell(number), ...figure },
    { title: "advantage", field: "advantage", width: 92, formatter: cell(number), ...figure },
    { title: "length", field: "length", width: 58, formatter: cell(String), ...figure },
    { title: "turns", field: "turns", width: 52, formatter: cell(String), ...figure },
    { title: "answer", field: "answer", widthGrow: 3, minWidth: 90, formatter: cell(String), headerSort: false },
  ];
}

const table = new Tabulator("#table", {
  data: rows.status.map((status, row) => ({
    row, id: idOf(row), status, reward: rows.reward[row], advantage: rows.advantage[row], length: rows.length[row],
    turns: turns[row].length, answer: answer(row),
  })),
  index: "row", columns: columns(), columnDefaults: { resizable: "header" }, layout: "fitColumns", height: "100%", placeholder: "none is left by the filters",
  initialSort: [{ column: "reward", dir: "asc" }],
  rowFormatter: (found) => found.getElement().classList.toggle("chosen", found.getData().row === chosen),
});

function refilter() {
  table.setFilter(kept);
  const left = table.getDataCount("active");
  byId("count").textContent = left === COUNT ? plural(COUNT, "trajectory").replace("ys", "ies") : `${left.toLocaleString("en")} of ${COUNT.toLocaleString("en")}`;
}

function range(name, from, to) {
  filters[name] = [from, to];
  byId(`${name}-from`).value = from ?? "";
  byId(`${name}-to`).value = to ?? "";
  refilter();
}

/* ---------- histograms ---------- */

const histograms = {};

function counted(values) {
  const finite = values.filter((value) => value !== null);
  const [low, high] = minmax(finite);
  const whole = finite.every(Number.isInteger);
  let width = (high - low) / BINS || 1;
  if (whole) width = Math.max(1, Math.ceil(width));
  const bins = Math.max(1, Math.floor((high - low) / width) + 1);
  const counts = new Array(bins).fill(0);
  for (const value of finite) counts[Math.min(bins - 1, Math.floor((value - low) / width))] += 1;
  return { low, width, counts, middles: counts.map((_, i) => low + (whole ? i * width : (i + 0.5) * width)), finite: finite.length, whole };
}

function minmax(values) {
  return values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
}

function histogram(name) {
  const place = byId(`histogram-${name}`);
  place.replaceChildren();
  const found = counted(rows[name]);
  if (!found.finite) return void place.append(element("p", { className: "gone", text: "nothing of it is on record" }));
  const style = getComputedStyle(document.documentElement);
  const [ink, line, bar] = ["--soft", "--line", "--cold"].map((variable) => style.getPropertyValue(variable));
  const axis = { stroke: ink, font: "11px system-ui", grid: { stroke: line, width: 1 }, ticks: { show: false } };
  const half = found.width / 2;
  histograms[name] = new uPlot(
    {
      width: place.clientWidth, height: 92, legend: { show: false },
      cursor: { y: false, points: { show: false }, drag: { x: true, y: false, setScale: false } },
      scales: { x: { time: false, range: [found.middles[0] - half, found.middles.at(-1) + half] }, y: { range: (u, low, high) => [0, high * 1.05] } },
      axes: [{ ...axis, grid: { show: false }, size: 20, gap: 2 }, { ...axis, size: 40, gap: 3, space: 24, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000] }],
      series: [{}, { fill: `rgba(${bar}, .55)`, stroke: `rgb(${bar})`, width: 0, points: { show: false }, paths: uPlot.paths.bars({ size: [0.92, 60] }) }],
      hooks: { setSelect: [(u) => u.select.width > 2 && select(name, u, found)] },
    },
    [found.middles, found.counts],
    place,
  );
}

function select(name, plot, found) {
  const at = (pixel) => plot.posToVal(pixel, "x");
  const [from, to] = [at(plot.select.left), at(plot.select.left + plot.select.width)];
  if (found.whole) return range(name, Math.ceil(from), Math.floor(to));
  const digits = Math.max(0, 2 - Math.floor(Math.log10(found.width * BINS)));
  range(name, Number(from.toFixed(digits)), Number(to.toFixed(digits)));
}

/* ---------- one trajectory ---------- */

let chosen = null;
let mode = "text";
let token = null; // which of the strip's tokens is looked at

function choose(row, scroll = true) {
  const before = chosen;
  [chosen, token] = [row, null];
  for (const one of [before, row]) if (one !== null && table.getRow(one)) table.getRow(one).reformat();
  if (scroll && table.getRow(row)) table.scrollToRow(row, "nearest", false).catch(() => {}); // filtered out
  draw();
  byId("one").scrollTop = 0;
}

function draw() {
  const strip = strips[chosen];
  const drawn = mode === "text" || !strip || !has_numbers(strip, mode) ? "text" : mode;
  const parts = [heading(chosen), siblings(chosen), modes(strip, drawn)];
  if (drawn === "text") parts.push(...turns[chosen].map((turn) => spoken(turn)));
  else parts.push(...coloured(strip, drawn));
  parts.push(lineage(chosen), element("div", { className: "token", id: "token", text: strip ? "" : no_strip() }));
  byId("one").replaceChildren(...parts.filter(Boolean));
  if (strip && drawn !== "text") look(token ?? strip.mask.search(/[01]/));
  else if (strip) byId("token").textContent = "1–6: text, or its tokens in colour · ← → from token to token";
}

const no_strip = () => `Tokens are here of ${Object.keys(strips).length} of ${COUNT}; of this one:  rollbook show ${report.run} --trajectory ${idOf(chosen)}`;
const has_numbers = (strip, name) => name === "text" || (strip[name] !== undefined && strip[name].length > 0);

function heading(row) {
  const components = Object.entries(rows.components).map(([name, values]) => [name, values[row] === null ? null : number(values[row])]);
  const error = interned("error", row);
  const made = [
    element("h2", { text: idOf(row) }),
    facts([
      ["reward", number(rows.reward[row])],
      ["advantage", number(rows.advantage[row])],
      ["status", rows.status[row]],
      ["tokens", `${rows.length[row]} of ${rows.stream[row]} sampled`],
      ["reference", interned("reference", row)],
      ["extracted", interned("extracted", row)],
      ["not trained on", rows.excluded[row]],
      ...components,
    ]),
  ];
  if (error !== null) made.push(element("div", { className: "error", children: written(error) }));
  return element("div", { children: made });
}

function siblings(row) {
  const group = rows.group[row];
  const members = rows.group.flatMap((own, i) => (own === group ? [i] : []));
  const spread = groups.finite[group] === null ? "" : `mean ${number(groups.mean[group])}, std ${number(groups.std[group])}, ${groups.finite[group]} scored`;
  const made = [element("span", { text: `group of ${members.length}${spread ? `: ${spread}` : ""}` })];
  for (const i of members.length > 1 ? members.slice(0, 64) : []) {
    const one = element("button", { type: "button", text: `${rows.branch[i] || "root"}  ${number(rows.reward[i], 2)}`, onclick: () => choose(i) });
    one.setAttribute("aria-pressed", String(i === row));
    made.push(one);
  }
  if (members.length > 64) made.push(element("span", { text: `and ${members.length - 64} more in the table` }));
  if (members.length > 1) made.push(element("button", { type: "button", text: "only these in the table  ( g )", onclick: only_group }));
  return element("div", { className: "siblings", children: made });
}

function only_group() {
  byId("group").value = groups.root[rows.group[chosen]];
  filters.group = byId("group").value.toLowerCase();
  refilter();
}

function modes(strip, drawn) {
  const made = Object.entries(MODES).map(([name, { label }]) => {
    const one = element("button", { type: "button", text: label, onclick: () => recolour(name), disabled: name !== "text" && (!strip || !has_numbers(strip, name)) });
    if (name === "gap" && report.gap_refused !== null) one.title = shown(`not measured: ${report.gap_refused}`);
    one.setAttribute("aria-pressed", String(name === drawn));
    return one;
  });
  return element("div", { className: "modes", children: [...made, legend(drawn)] });
}

function recolour(name) {
  mode = name;
  draw();
}

function turn_title(turn) {
  const policy = turn[POLICY] === null ? null : policies[turn[POLICY]];
  const more = [
    `${turn[LENGTH]} tokens`, turn[FINISH], policy && `policy ${policy[0]}`,
    turn[ENV_REWARD] !== null && `environment's reward ${number(turn[ENV_REWARD])}`,
  ].filter(Boolean);
  return element("h3", { children: [element("b", { text: turn[ROLE] }), shown(`  ${more.join(" · ")}`)] });
}

function turn_box(turn, body) {
  const calls = turn[TOOL_CALLS] === null ? [] : [element("pre", { className: "gone", children: written(texts[turn[TOOL_CALLS]]) })];
  return element("section", { className: turn[GENERATED] ? "turn generated" : "turn", children: [turn_title(turn), body, ...calls] });
}

const spoken = (turn) => turn_box(turn, element("pre", { children: written(texts[turn[TEXT]]) }));

/* ---------- the strip ---------- */

// The same colours mean the same numbers in every trajectory of the page.
const scale = (() => {
  const largest = (name) => {
    const all = Object.values(strips).flatMap((strip) => strip[name] ?? []).filter((x) => x !== null).map(Math.abs).sort((a, b) => a - b);
    return all.length ? all[Math.floor(0.99 * (all.length - 1))] || 1e-9 : 1;
  };
  return { rollout_logprobs: 5, token_advantages: largest("token_advantages"), values: largest("values"), gap: 1 };
})();

/* [hue, strength from 0 to 1] of a number, or of a sign of the mask. */
function tint(name, value) {
  if (value === null) return ["plain", 0.5];
  if (name === "mask") return value === "1" ? ["cold", 0.7] : ["warm", 0.7];
  if (name === "rollout_logprobs") return ["warm", Math.min(1, -value / scale[name])];
  const hue = value < 0 ? "warm" : "cold";
  if (name === "gap") return [hue, Math.max(0, Math.min(1, (Math.log10(Math.abs(value) || 1e-9) + 5) / 5))];
  return [hue, Math.min(1, Math.abs(value) / scale[name])];
}

const paint = (node, [hue, strength]) => (node.style.backgroundColor = `rgba(var(--${hue}), ${(0.75 * strength).toFixed(3)})`);

function legend(name) {
  if (name === "text") return "";
  const samples = {
    rollout_logprobs: [["0", 0], ["−2.5", -2.5], ["−5 nats", -5]],
    gap: [["−.1", -0.1], ["−.001", -0.001], ["0", 0], [".001", 0.001], [".1", 0.1]],
    mask: [["in the loss", "1"], ["not in it", "0"]],
  }[name] ?? [-1, -0.5, 0, 0.5, 1].map((part) => [number(part * scale[name], 2), part * scale[name]]);
  const made = samples.map(([label, value]) => {
    const swatch = element("span", { text: label });
    paint(swatch, tint(name, value));
    return swatch;
  });
  return element("span", { className: "legend", children: made });
}

/* Every turn with its tokens. A turn of which a part is left out says how much. */
function coloured(strip, name) {
  const [cut_at, gone] = strip.cut ?? [strip.ids.length, 0];
  const before = []; // of each token, how many sampled ones come before it
  let sampled = 0;
  for (const sign of strip.mask) before.push(sign === "·" ? sampled : sampled++);
  const nodes = strip.ids.map((id, i) => token_node(strip, name, i, before[i]));
  let start = 0;
  return turns[chosen].map((turn) => {
    const stop = start + turn[LENGTH];
    const left = (at) => Math.max(0, at <= cut_at ? at : Math.max(cut_at, at - gone)); // where a place of the stream is in the strip
    const parts = nodes.slice(left(start), left(stop));
    const lost = stop - start - parts.length;
    if (lost > 0) parts.splice(Math.max(0, Math.min(parts.length, cut_at - left(start))), 0, element("span", { className: "gone", text: ` … ${plural(lost, "token")} left out … ` }));
    start = stop;
    return turn_box(turn, element("pre", { className: "strip", children: parts }));
  });
}

/* The text of a token. Of those that share a character the first has it. */
const spelled = (strip, i) => strip.spelled?.[i] ?? words[strip.ids[i]] ?? `⟨${strip.ids[i]}⟩`;

function token_node(strip, name, i, nth) {
  const sign = strip.mask[i];
  const node = element("span", { text: spelled(strip, i).replaceAll("\n", "⏎\n") || "‿" });
  node.dataset.at = i;
  if (sign === "0") node.className = "outside";
  if (sign !== "·") paint(node, tint(name, name === "mask" ? sign : strip[name][nth]));
  return node;
}

/* What is known of a token, in a line. */
function look(at) {
  const strip = strips[chosen];
  if (at < 0 || at >= strip.ids.length) return;
  token = at;
  for (const old of byId("one").querySelectorAll("span.at")) old.classList.remove("at");
  byId("one").querySelector(`span[data-at="${at}"]`)?.classList.add("at");
  const sign = strip.mask[at];
  const nth = [...strip.mask.slice(0, at)].filter((c) => c !== "·").length;
  const of = (name) => (strip[name] === undefined || sign === "·" ? null : strip[name][nth]);
  const place = strip.cut && at >= strip.cut[0] ? at + strip.cut[1] : at;
  const pairs = [
    ["token", place], ["id", strip.ids[at]], ["", JSON.stringify(spelled(strip, at))],
    ["log-prob", number(of("rollout_logprobs"))], ["value", number(of("values"))], ["advantage", number(of("token_advantages"))],
    ["gap", of("gap") === null ? "–" : of("gap").toPrecision(2).replaceAll("-", "−")],
    ["", { "·": "not sampled", 1: "in loss", 0: "not in loss" }[sign]],
  ];
  byId("token").replaceChildren(...pairs.flatMap(([name, value]) => [name ? `${name} ` : "", element("b", { text: value }), "   "]));
}

/* ---------- lineage ---------- */

function lineage(row) {
  const line = (name, value) => element("tr", { children: [element("td", { text: name }), element("td", { children: [element("code", { text: value })] })] });
  const used = [...new Set(turns[row].filter((turn) => turn[POLICY] !== null).map((turn) => turn[POLICY]))];
  const made = used.map((i) => line("sampled by", `policy ${policies[i][0]}  ${policies[i][1]}`));
  for (const { step, digest, uri, seconds, seed, inputs } of report.steps) {
    const sources = Object.entries(inputs).map(([name, { digest, path }]) => `${name} ${digest.slice(0, 12)}${path ? ` (${path.replace("/manifest.json", "")})` : ""}`);
    made.push(line(step, `${digest.slice(0, 16)}  of ${sources.join(", ")}; ${seconds} s, seed ${seed}\n${uri}`));
  }
  made.push(line("in a terminal", `rollbook lineage ${report.run}:${idOf(row)}`));
  return element("details", { open: lineage.open, ontoggle: (event) => (lineage.open = event.target.open), children: [element("summary", { text: "lineage" }), element("table", { className: "lineage", children: made })] });
}
lineage.open = false;

/* ---------- what is around it ---------- */

function figures() {
  const m = report.metrics;
  const told = [
    ["reward", m["reward/mean"], 3], ["length", m["response_length/mean"], 1], ["KL", m["kl/k3"], 4], ["entropy", m["entropy/mean"], 2],
    ["clipped", (m["clip_fraction/low"] ?? 0) + (m["clip_fraction/high"] ?? 0), 3], ["explained variance", m["value/explained_variance"], 2], ["policy", m["policy_version"], 0],
  ];
  byId("title").textContent = `${report.run}, iteration ${report.iteration}`;
  document.title = byId("title").textContent;
  const parts = told.filter(([, value]) => value !== undefined && value !== null);
  byId("figures").replaceChildren(...parts.flatMap(([name, value, digits]) => [`${name} `, element("b", { text: number(value, digits) }), "   "]));
}

function left_out() {
  const sample = Object.values(strips);
  const cut = texts.filter(Array.isArray);
  const tokens = sample.reduce((sum, strip) => sum + (strip.cut?.[1] ?? 0), 0);
  const told = [sample.length === COUNT ? "Tokens of all trajectories" : `Tokens of ${plural(sample.length, "trajectory").replace("ys", "ies")} of ${COUNT.toLocaleString("en")}: whole groups, the worst, the best and failed ones among them`];
  if (tokens) told.push(`${plural(tokens, "token")} left out of the middle of long ones`);
  told.push(cut.length ? `${plural(cut.length, "text")} of ${texts.length.toLocaleString("en")} cut, ${plural(cut.reduce((sum, c) => sum + c[1], 0), "character")} left out` : "texts whole");
  told.push("Keys: ↑ ↓ trajectory, ← → token, 1–6 colour, / search, g group, Esc all");
  byId("left-out").textContent = told.join(" · ");
}

function listen() {
  for (const name of ["search", "status", "group"]) {
    byId(name).addEventListener("input", (event) => { filters[name] = name === "status" ? event.target.value : event.target.value.toLowerCase(); refilter(); });
  }
  for (const name of RANGES) {
    const read = (end) => (byId(`${name}-${end}`).value === "" ? null : Number(byId(`${name}-${end}`).value));
    for (const end of ["from", "to"]) byId(`${name}-${end}`).addEventListener("input", () => { filters[name] = [read("from"), read("to")]; refilter(); });
  }
  byId("filters").addEventListener("submit", (event) => event.preventDefault());
  byId("filters").addEventListener("reset", () => clear());
  byId("one").addEventListener("mouseover", (event) => event.target.dataset?.at !== undefined && look(Number(event.target.dataset.at)));
  document.addEventListener("keydown", pressed);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => RANGES.forEach(histogram));
  new ResizeObserver(() => RANGES.forEach((name) => histograms[name]?.setSize({ width: byId(`histogram-${name}`).clientWidth, height: 92 }))).observe(byId("histograms"));
}

function clear() {
  Object.assign(filters, { search: "", status: "", group: "" });
  for (const name of RANGES) {
    filters[name] = [null, null];
    histograms[name]?.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
  }
  refilter();
}

function step(by) {
  const order = table.getRows("active").map((found) => found.getData().row);
  const at = order.indexOf(chosen);
  const next = order[Math.max(0, Math.min(order.length - 1, at < 0 ? 0 : at + by))];
  if (next !== undefined) choose(next);
}

function pressed(event) {
  if (event.key === "Escape") { byId("filters").reset(); document.activeElement.blur(); return; }
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select")) return;
  const keys = { ArrowDown: () => step(1), j: () => step(1), ArrowUp: () => step(-1), k: () => step(-1), "/": () => byId("search").focus(), g: only_group };
  keys.ArrowLeft = () => look(token - 1);
  keys.ArrowRight = () => look(token + 1);
  Object.keys(MODES).forEach((name, i) => (keys[i + 1] = () => recolour(name)));
  if (event.key.startsWith("Arrow") && token === null && event.key !== "ArrowDown" && event.key !== "ArrowUp") return;
  if (!keys[event.key]) return;
  event.preventDefault();
  keys[event.key]();
}

for (const status of [...new Set(rows.status)].sort()) byId("status").append(element("option", { text: status, value: status }));
table.on("tableBuilt", () => { refilter(); step(0); });
table.on("rowClick", (event, found) => choose(found.getData().row, false));
figures();
left_out();
listen();
RANGES.forEach(histogram);

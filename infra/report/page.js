// What is around it: figures, what is left out, keys.

function figures() {
  const m = report.metrics;
  const told = [
    ["reward", m["reward/mean"], 3], ["length", m["response_length/mean"], 1], ["KL", m["kl/k3"], 4], ["entropy", m["entropy/mean"], 2],
    ["clipped", m["clip_fraction/low"] === undefined ? undefined : m["clip_fraction/low"] + (m["clip_fraction/high"] ?? 0), 3], ["explained variance", m["value/explained_variance"], 2], ["policy", m["policy_version"], 0],
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

// One trajectory: what came of it, its siblings, its turns, its lineage.

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

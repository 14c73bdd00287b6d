// The table of trajectories, and what it is filtered by.

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
    { title: "status", field: "status", width: 86, formatter: status },
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
    turns: turns[row].filter((turn) => turn[GENERATED]).length, answer: answer(row),
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

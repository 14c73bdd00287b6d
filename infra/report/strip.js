// The tokens of a trajectory in colour. The same colours mean the same numbers in every trajectory of the page.

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

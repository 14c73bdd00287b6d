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

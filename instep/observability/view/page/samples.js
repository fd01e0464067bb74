// A list of samples by reward, status, length and group. The server has the index; the page gets one part of the list.

import { api, h, number } from "./dom.js";
import { address, go } from "./main.js";

const SIZE = 50;
const ORDERS = { new: "newest first", old: "oldest first", reward: "lowest reward first", "-reward": "highest reward first", "-length": "longest first", length: "shortest first", "-gap": "largest gap first" };
const marked = new Set();

export async function samples({ runs, query: asked }) {
  const run = runs.find((one) => String(one.id) === asked.run) || runs[runs.length - 1], query = { ...asked, run: run.id };
  const found = (await api("samples", { ...query, runs: run.id, size: SIZE }))[0];
  if (!found.size) return h("p", { class: "dim" }, `${run.name} has logged no samples (--num-logged-samples 0, or no step has ended yet).`);
  const set = (name, value) => go("samples", { ...query, page: "", [name]: value });
  const reading = found.read < found.size * 0.999;
  if (reading) setTimeout(() => { if (address().part === "samples" && location.hash === here) window.dispatchEvent(new HashChangeEvent("hashchange")); }, 150);
  const here = location.hash;
  return [
    filters(runs, found, { ...query, split: found.split }, set),
    h("p", { class: "dim" }, count(found, run), reading ? ` Reading the file: ${Math.round((100 * found.read) / found.size)} % of ${(found.size / 1e6).toFixed(0)} MB.` : ""),
    list(run, found), pager(found, query),
  ];
}

function filters(runs, found, query, set) {
  const select = (name, text, choices) => h("label", {}, text, h("select", { onchange: (event) => set(name, event.target.value) },
    choices.map(([value, label]) => h("option", { value, selected: String(query[name] ?? "") === String(value) }, label))));
  const field = (name, place) => h("input", { type: "number", step: "any", placeholder: place, value: query[name] ?? "", "aria-label": `${name.replace("_", " ")}`, onchange: (event) => set(name, event.target.value) });
  const range = (text, least, most) => h("label", {}, text, field(least, "from"), "–", field(most, "to"));
  return h("div", { class: "bar filters" },
    runs.length > 1 && select("run", "run", runs.map((one) => [one.id, one.name])),
    select("split", "of", found.splits.map((name) => [name, name])),
    range("rollout", "from", "to"), !found.rows.some(hasLoss) && range("reward", "min_reward", "max_reward"), range("tokens", "min_length", "max_length"),
    select("status", "status", [["", "any"], ...found.statuses.map((name) => [name, name])]),
    h("label", {}, "group", field("group", "any")),
    select("order", "order", Object.entries(ORDERS)));
}

function count(found, run) {
  const of = found.rows[0] && found.rows[0].num_samples, per = of ? ` A rollout has ${of}; --num-logged-samples ${of} logs all.` : "";
  const part = found.matching === found.total ? `${found.total.toLocaleString("en-US")} samples are logged.` : `${found.matching.toLocaleString("en-US")} of ${found.total.toLocaleString("en-US")} samples that are logged.`;
  return part + (found.total < (of || 0) * (run.num_steps || 1) ? per : "");
}

function list(run, found) {
  const beside = h("button", { hidden: marked.size < 2, onclick: () => go("sample", { run: run.id, at: [...marked].map((key) => key.split(":")[1]) }) }, "marked ones side by side");
  const mark = (row) => h("input", { type: "checkbox", checked: marked.has(`${run.id}:${row.offset}`), "aria-label": "mark", onclick: (event) => event.stopPropagation(),
    onchange: (event) => { const key = `${run.id}:${row.offset}`; if (event.target.checked) marked.add(key); else marked.delete(key); beside.hidden = marked.size < 2; } });
  for (const key of [...marked]) if (!key.startsWith(`${run.id}:`)) marked.delete(key);
  const columns = [
    ["rollout", "num", (row) => row.rollout], ["group", "num", (row) => row.group], ["sample", "num", (row) => row.index],
    found.rows.some(hasLoss) ? ["loss", "num", (row) => number(row.loss, 4)] : ["reward", "num", (row) => number(row.reward)],
    ["tokens", "num", (row) => row.length], ["status", "status", (row) => row.status],
    found.rows.some((row) => row.gap !== null) && ["largest gap", "num", (row) => number(row.gap, 4)],
    found.rows.some((row) => row.versions) && ["version", "num", (row) => row.versions || "–"],
    ["response", "text", (row) => row.response],
  ].filter(Boolean);
  const rows = found.rows.map((row) => h("tr", { class: "link", tabindex: 0, onclick: () => go("sample", { run: run.id, at: row.offset }),
    onkeydown: (event) => { if (event.key === "Enter") go("sample", { run: run.id, at: row.offset }); } },
  h("td", {}, mark(row)), columns.map(([name, kind, text]) => h("td", { class: name !== "status" ? kind : row.status === "completed" ? null : "warn" }, text(row)))));
  const head = h("tr", {}, h("th", {}), columns.map(([name, kind]) => h("th", { class: kind }, name)));
  return [beside, h("div", { class: "scroll" }, h("table", { class: "grid list" }, head, rows))];
}

const hasLoss = (row) => "loss" in row;

function pager(found, query) {
  const page = Number(query.page) || 0, last = Math.max(0, Math.ceil(found.matching / SIZE) - 1);
  const to = (text, number) => h("button", { disabled: number < 0 || number > last || number === page, onclick: () => go("samples", { ...query, page: number || "" }) }, text);
  if (!last) return null;
  return h("div", { class: "bar" }, to("first", 0), to("‹ before", page - 1), h("span", {}, `${found.first + 1}–${Math.min(found.first + SIZE, found.matching)} of ${found.matching.toLocaleString("en-US")}`), to("next ›", page + 1), to("last", last));
}

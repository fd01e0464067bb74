// The flags of the chosen runs. Those that differ come first.

import { api, h } from "./dom.js";

const state = { text: "", all: false };

export async function flags({ runs }) {
  const rows = await api("flags", { runs: runs.map((run) => run.id) });
  const body = h("div", {});
  const draw = () => body.replaceChildren(...tables(rows, runs));
  const search = h("input", { type: "search", placeholder: "part of a name or value", value: state.text, "aria-label": "filter", oninput: (event) => { state.text = event.target.value; draw(); } });
  const all = h("label", {}, h("input", { type: "checkbox", checked: state.all, onchange: (event) => { state.all = event.target.checked; draw(); } }), " show defaults, too");
  draw();
  return [h("div", { class: "bar" }, search, all), body];
}

function tables(rows, runs) {
  const words = state.text.toLowerCase();
  const fits = (row) => !words || row.name.toLowerCase().includes(words) || row.values.some((v) => shown(v).toLowerCase().includes(words));
  const mine = rows.filter(fits), parts = [];
  const differ = mine.filter((row) => row.differ), same = mine.filter((row) => !row.differ && row.part === "args" && (state.all || row.changed));
  const head = h("tr", {}, h("th", {}, "flag"), runs.map((run) => h("th", {}, h("i", { class: "box", style: { background: run.color } }), run.name)));
  if (runs.length > 1) {
    parts.push(h("h2", {}, `Flags that differ: ${differ.length}`), differ.length
      ? h("div", { class: "scroll" }, h("table", { class: "grid flags" }, head.cloneNode(true), differ.map((row) => line(row, row.values))))
      : h("p", { class: "dim" }, "All flags are the same."));
  }
  parts.push(h("h2", {}, `${runs.length > 1 ? "Equal flags" : "Flags"}${state.all ? "" : " other than their defaults"}: ${same.length}`));
  parts.push(h("div", { class: "scroll" }, h("table", { class: "grid flags" }, same.map((row) => line(row, [row.values[0]])))));
  return parts;
}

const line = (row, values) => h("tr", { title: row.help || null }, h("td", {}, row.part === "versions" ? `version of ${row.name}` : row.name),
  values.map((value) => h("td", { class: value === null ? "dim" : null }, h("div", { class: "clip", title: shown(value).length > 200 ? shown(value) : null }, shown(value)))));

function shown(value) {
  if (value === null || value === undefined) return "–";
  return typeof value === "string" ? value : JSON.stringify(value);
}

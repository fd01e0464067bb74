// Elements, numbers and requests. Text of runs gets into the page by textContent alone.

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(node.style, value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(3)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return node;
}

export const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
export const s = (tag, attributes, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

export async function api(name, query = {}) {
  const given = Object.entries(query).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const answer = await fetch(`api/${name}?${new URLSearchParams(given)}`);
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}

// As `number` of figures.py: 1,234 or 0.412 or 1.2e-06.
export function number(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e9 || size < 1e-3) return value.toExponential(1).replace(".0e", "e").replace("e-", "e−").replace("-", "−").replace("+", "");
  const text = size >= 1000 ? Math.round(value).toLocaleString("en-US") : trimmed(value, digits);
  return text.replace("-", "−");
}

const trimmed = (value, digits) => {
  const places = Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 10 ? Math.min(1, digits) : digits;
  const text = value.toFixed(places);
  return text.includes(".") ? text.replace(/\.?0+$/, "") : text;
};

export function duration(seconds) {
  if (seconds < 0.1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  const rest = String(Math.round(seconds) % 60).padStart(2, "0");
  return minutes < 60 ? `${minutes}:${rest} min` : `${Math.floor(minutes / 60)}:${String(minutes % 60).padStart(2, "0")} h`;
}

export const bytes = (value) => (value === null || value === undefined ? "–" : `${(value / 1e9).toFixed(2)} GB`);

const tip = () => document.getElementById("tip");

export function showTip(event, ...children) {
  const box = tip();
  box.replaceChildren(...children.flat().filter(Boolean));
  box.hidden = false;
  const { width, height } = box.getBoundingClientRect();
  const left = Math.min(event.clientX + 14, window.innerWidth - width - 8);
  const below = event.clientY + 18 + height < window.innerHeight;
  box.style.left = `${Math.max(8, left)}px`;
  box.style.top = `${below ? event.clientY + 18 : Math.max(8, event.clientY - height - 12)}px`;
}

export const hideTip = () => { tip().hidden = true; };

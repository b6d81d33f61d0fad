// Small tools for a page that changes every second: nodes are kept, and only what differs is written.

export const $ = (id) => document.getElementById(id);

export function element(tag, className = "", text = "") {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text) node.textContent = text;
  return node;
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function setClass(node, className) {
  if (node.className !== className) node.className = className;
}

/**
 * A table whose rows have keys. A column is {name, title?, kind?: "number" | "mono", make?, show}: `make(cell)` builds a
 * cell once, `show(cell, row)` brings it up to date; without `make`, `show` returns the text.
 */
export class Table {
  constructor(table, columns) {
    this.columns = columns;
    this.rows = new Map();
    this.table = table;
    const head = table.createTHead().insertRow();
    for (const column of columns) {
      const cell = element("th", column.kind === "number" ? "number" : "", column.name);
      cell.scope = "col";
      if (column.title) cell.title = column.title;
      head.append(cell);
    }
    this.body = table.createTBody();
  }

  /** Shows `rows` in this order. `key(row)` names a row; `mark(row)` gives its class. */
  show(rows, key, mark = () => "") {
    const kept = new Map();
    let before = this.body.firstChild;
    for (const row of rows) {
      const name = key(row);
      const line = this.rows.get(name) ?? this.#make();
      kept.set(name, line);
      if (line === before) before = before.nextSibling;
      else this.body.insertBefore(line, before);
      setClass(line, mark(row));
      this.columns.forEach((column, position) => {
        const cell = line.cells[position];
        const text = column.show(cell, row);
        if (!column.make) setText(cell, text);
      });
    }
    for (const [name, line] of this.rows) if (!kept.has(name)) line.remove();
    this.rows = kept;
    this.table.hidden = rows.length === 0;
  }

  #make() {
    const line = document.createElement("tr");
    for (const column of this.columns) {
      const cell = line.insertCell();
      if (column.kind) cell.className = column.kind;
      column.make?.(cell);
    }
    return line;
  }
}

// figures

const NONE = "–";
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

export const count = (value) => (value == null ? NONE : whole.format(value));
export const short = (value) => (value == null ? NONE : value < 10000 ? whole.format(value) : compact.format(value));
export const share = (value) => (value == null ? NONE : `${(value * 100).toFixed(value > 0 && value < 0.1 ? 1 : 0)} %`);

export function rate(value) {
  if (value == null) return NONE;
  return value >= 100 || value === 0 ? short(value) : value.toFixed(value >= 10 ? 1 : 2);
}

export function seconds(value) {
  if (value == null) return NONE;
  if (Math.abs(value) < 0.00005) return "0 ms";
  if (value < 0.01) return `${(value * 1000).toFixed(1)} ms`;
  return value < 1 ? `${(value * 1000).toFixed(0)} ms` : `${value.toFixed(value < 10 ? 2 : 1)} s`;
}

export function age(value) {
  const units = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
  const [unit, size] = units.find(([, length]) => value >= length) ?? units[3];
  return `${Math.floor(value / size)} ${unit}`;
}

// The behaviour of all pages: live figures and states, and figures of queries.
// Values of a run are only ever set as text, never as markup; sizes and colours are set by the DOM, since the page's
// policy forbids style attributes in markup.
"use strict";

const HEIGHT = 220;
const DASHES = [undefined, [7, 3], [2, 2.5], [9, 3, 2, 3], [4, 2]]; // as in the report
const MOST_DOTS = 60; // figures of up to this many points are drawn with a dot at each

const styleOf = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const colourOf = (number) => styleOf(`--s${number}`);
// A tick of a log axis: small and large ones as powers, such as 1e-6, which have room.
const power = (tick) => (tick !== 0 && (tick < 0.001 || tick >= 1e6) ? Number(tick.toPrecision(3)).toExponential().replace("e+", "e") : shown(tick, 3));
const shown = (value, digits = 6) => (value === null || value === undefined ? "-" : String(Number(value.toPrecision(digits))));

function element(tag, properties, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

// --- Axes: numbers of any size, also such that differ in their last digits alone -------------------------------------

const CLOSE = 1e-5; // an axis spans at least this share of its largest value, so that eight digits tell its ticks apart
const TICK_DIGITS = 8;
const LARGEST = 7e307; // an axis from -LARGEST to LARGEST, with room around it, still has a length

// The ends of an axis, apart from each other.
function apart(low, high) {
  const size = Math.max(Math.abs(low), Math.abs(high));
  const half = high - low > CLOSE * size ? 0 : size / 10 || 0.5;
  return [Math.max(-LARGEST, low - half), Math.min(LARGEST, high + half)];
}

// With some room around the values, but not across 0.
function roomy(least, most) {
  const [low, high] = apart(least, most);
  const room = 0.1 * (high - low);
  return [least >= 0 && low - room < 0 ? 0 : low - room, most <= 0 && least < 0 && high + room > 0 ? 0 : high + room];
}

function decades(least, most) {
  const [low, high] = [Math.floor(Math.log10(least)), Math.ceil(Math.log10(most))].map((it) => Math.min(307, it));
  return [10 ** (low === high ? low - 1 : low) || 5e-324, 10 ** high];
}

// A round step between ticks that leaves them some pixels of room. isWhole: it is a whole number.
function tickStep(low, high, size, space, isWhole) {
  const rough = (high - low) / Math.max(1, Math.floor(size / space));
  const unit = 10 ** Math.floor(Math.log10(rough)) || rough;
  const step = [1, 2, 5, 10].map((factor) => factor * unit).find((each) => each >= rough) ?? rough;
  return isWhole ? Math.max(1, step) : step;
}

function ticks(low, high, step) {
  const first = Math.ceil(low / step - 1e-9);
  const number = Math.min(100, Math.floor(high / step + 1e-9) - first + 1);
  return Array.from({ length: Math.max(0, number) }, (_, index) => (first + index) * step);
}

// Powers of 10, every so many that they have room; of few, also their multiples.
function logTicks(low, high, most) {
  const [first, last] = [Math.round(Math.log10(low)), Math.round(Math.log10(high))];
  const every = Math.ceil((last - first + 1) / Math.max(1, most));
  const factors = last - first < 3 ? [1, 2, 5] : [1];
  return ticks(first, last, every)
    .flatMap((exponent) => factors.map((factor) => factor * 10 ** exponent))
    .filter((tick) => low <= tick && tick <= high);
}

// --- One figure: ludic.app.show.figures.FigureData.to_json -----------------------------------------------------------

class Plot {
  constructor(data) {
    this.data = data;
    this.isLog = data.log_y;
    this.place = element("div", { className: "plot" });
    this.notes = element("div", { className: "dim" });
    this.log = element("button", { type: "button", className: "small", textContent: "log" });
    this.log.addEventListener("click", () => this.toggle());
    const title = data.href ? element("a", { href: data.href, textContent: data.title }) : data.title;
    this.caption = element("figcaption", {}, element("b", {}, title), " ");
    this.caption.append(element("span", { className: "dim", textContent: data.unit }), " ", this.log);
    this.element = element("figure", {}, this.caption, this.place, this.notes);
    new ResizeObserver(() => this.resize()).observe(this.place);
  }

  toggle() {
    const zoom = this.isZoomed ? { ...this.chart.scales.x } : null;
    this.isLog = !this.isLog;
    this.draw();
    if (zoom) this.chart.setScale("x", { min: zoom.min, max: zoom.max });
  }

  // Draw other numbers of the same figure; keeps the zoom if the lines are the same.
  update(data) {
    const isSame = JSON.stringify(this.names(data)) === JSON.stringify(this.names(this.data));
    this.data = data;
    if (this.chart && isSame) {
      const { min, max } = this.chart.scales.x;
      const isZoomed = this.isZoomed;
      this.chart.setData(this.columns(), !isZoomed);
      if (isZoomed) this.chart.setScale("x", { min, max });
      this.say();
    } else this.draw();
  }

  names(data) {
    return data.series.map((each) => [each.name, each.low.length > 0]);
  }

  get isZoomed() {
    const [xs, { min, max }] = [this.chart.data[0], this.chart.scales.x];
    return xs.length > 1 && (min > xs[0] || max < xs[xs.length - 1]);
  }

  columns() {
    const known = (value) => (this.isLog && value !== null && value <= 0 ? null : value);
    return [this.data.x, ...this.data.series.map((each) => each.values.map(known))];
  }

  say() {
    const left = this.isLog ? this.data.series.flatMap((each) => each.values).filter((it) => it !== null && it <= 0) : [];
    const notes = [...this.data.notes];
    if (left.length) notes.push(`${left.length} values at or below 0 are not on a log axis.`);
    this.notes.replaceChildren(...notes.map((text) => element("p", { textContent: text })));
  }

  draw() {
    this.chart?.destroy();
    this.log.setAttribute("aria-pressed", String(this.isLog));
    this.chart = new uPlot(this.options(), this.columns(), this.place);
    this.say();
  }

  resize() {
    const width = this.place.clientWidth;
    if (this.chart && width && width !== this.chart.width) this.chart.setSize({ width, height: HEIGHT });
  }

  options() {
    const [dim, rule] = [styleOf("--dim"), styleOf("--rule")];
    const isWhole = ["step", "version"].includes(this.data.x_name);
    const axis = {
      stroke: dim,
      grid: { stroke: rule, width: 1 },
      ticks: { stroke: rule, width: 1 },
      incrs: (_, index, low, high, size, space) => {
        const step = tickStep(low, high, size, space, isWhole && index === 0);
        return [step, 2 * step, high - low];
      },
      splits: (chart, index, low, high, step) =>
        index === 1 && this.isLog ? logTicks(low, high, HEIGHT / 40) : ticks(low, high, step),
      filter: (_, splits) => splits,
      values: (_, splits, index) => splits.map((tick) => (index === 1 && this.isLog ? power(tick) : shown(tick, TICK_DIGITS))),
    };
    return {
      width: this.place.clientWidth || 360,
      height: HEIGHT,
      // One cursor, and one zoom, over all figures of the same axis.
      cursor: { sync: { key: this.data.x_name }, drag: { x: true, y: false } },
      scales: { x: { time: false, range: (_, low, high) => (low === null ? [0, 1] : apart(low, high)) }, y: { distr: this.isLog ? 3 : 1, range: (...given) => this.range(...given) } },
      axes: [axis, { ...axis, size: 66 }],
      series: [
        { label: this.data.x_name },
        ...this.data.series.map((each) => ({
          label: each.name,
          stroke: colourOf(each.colour),
          dash: DASHES[each.dash],
          width: 1.8,
          spanGaps: true,
          points: { show: this.data.x.length * this.data.series.length <= MOST_DOTS, size: 5 },
          value: (_, value) => shown(value),
        })),
      ],
      hooks: { drawAxes: [(chart) => this.drawIntervals(chart)], draw: [(chart) => this.drawMarks(chart)] },
    };
  }

  // The lowest and highest value to show, with the intervals' bounds.
  range(chart, low, high) {
    const [first, last] = chart.series[0].idxs ?? [0, this.data.x.length - 1];
    const bounds = this.data.series
      .filter((_, index) => chart.series[index + 1]?.show)
      .flatMap((each) => [...each.low.slice(first, last + 1), ...each.high.slice(first, last + 1)])
      .filter((value) => value !== null && (!this.isLog || value > 0));
    const values = [low, high, ...bounds].filter((value) => value !== null && value !== undefined);
    if (!values.length) return this.isLog ? [0.1, 1] : [0, 1];
    const [least, most] = [Math.min(...values), Math.max(...values)];
    return this.isLog ? decades(least, most) : roomy(least, most);
  }

  // A band between the bounds of a line, or a bar at each point.
  drawIntervals(chart) {
    const context = chart.ctx;
    const x = (index) => chart.valToPos(this.data.x[index], "x", true);
    const y = (value) => chart.valToPos(value, "y", true);
    context.save();
    context.beginPath();
    context.rect(chart.bbox.left, chart.bbox.top, chart.bbox.width, chart.bbox.height);
    context.clip();
    this.data.series.forEach((each, index) => {
      const isKnown = (at) => each.low[at] !== null && each.high[at] !== null && (!this.isLog || each.low[at] > 0);
      const at = each.low.map((_, place) => place).filter(isKnown);
      if (!at.length || !chart.series[index + 1].show) return;
      context.strokeStyle = context.fillStyle = colourOf(each.colour);
      context.beginPath();
      if (each.band) {
        at.forEach((place) => context.lineTo(x(place), y(each.high[place])));
        at.toReversed().forEach((place) => context.lineTo(x(place), y(each.low[place])));
        context.globalAlpha = 0.18;
        context.fill();
      } else {
        for (const place of at) {
          context.moveTo(x(place), y(each.low[place]));
          context.lineTo(x(place), y(each.high[place]));
        }
        context.globalAlpha = 0.7;
        context.stroke();
      }
      context.globalAlpha = 1;
    });
    context.restore();
  }

  // A dashed line at the step where a warning begins: in a figure of one run with its number, if that has room, else in
  // the colour of its run.
  drawMarks(chart) {
    const context = chart.ctx;
    const { left, top, width, height } = chart.bbox;
    const [gap, bad] = [3 * devicePixelRatio, styleOf("--bad")];
    let end = left; // of the last label
    context.save();
    context.font = `${11 * devicePixelRatio}px system-ui`;
    context.textAlign = "left";
    context.textBaseline = "alphabetic";
    context.setLineDash([gap, gap]);
    context.globalAlpha = 0.8;
    for (const mark of [...this.data.marks].sort((a, b) => a.x - b.x)) {
      const x = chart.valToPos(mark.x, "x", true);
      if (x < left || x > left + width) continue;
      context.strokeStyle = context.fillStyle = mark.colour === null ? bad : colourOf(mark.colour);
      context.beginPath();
      context.moveTo(x, top);
      context.lineTo(x, top + height);
      context.stroke();
      const size = context.measureText(mark.label).width;
      const start = x + gap + size > left + width ? x - gap - size : x + gap;
      if (mark.colour !== null || start < end) continue;
      context.fillText(mark.label, start, top + 11 * devicePixelRatio);
      end = start + size + gap;
    }
    context.restore();
  }
}

const hasValues = (data) => data.series.some((each) => each.values.some((value) => value !== null));
const isZero = (data) => data.series.every((each) => each.values.every((value) => value === null || value === 0));
// Figures that are 0 everywhere are named below the others; but a reward of 0 is what a reader has to see.
const isDrawn = (data) => hasValues(data) && (!isZero(data) || data.name.split("/")[0] === "reward_mean");

// --- A place of figures, which are read from an address again and again ---------------------------------------------

const READING = "reading ...";

// Call a function with what an address answers, when that is new; data-every is the seconds between two looks.
function follow(place, show, onProblem = () => {}) {
  const problem = element("p", { className: "bad", role: "alert", hidden: true });
  place.before(problem);
  let etag = null;
  async function look() {
    if (document.hidden && etag !== null) return;
    try {
      const headers = { Accept: "application/json", ...(etag === null ? {} : { "If-None-Match": etag }) };
      const answer = await fetch(place.dataset.src, { headers });
      if (answer.status !== 304) {
        const value = await answer.json();
        if (!answer.ok) throw new Error(value.problem);
        etag = answer.headers.get("ETag");
        show(value);
      }
      problem.hidden = true;
    } catch (error) {
      problem.hidden = false;
      problem.textContent = error instanceof TypeError ? "The command has ended, or can't be reached." : error.message;
      onProblem();
    }
  }
  async function again() {
    await look();
    if (place.dataset.every) setTimeout(again, 1000 * Number(place.dataset.every));
  }
  again();
}

function showFigures(place) {
  const plots = new Map();
  const aside = element("p", { className: "dim", textContent: READING });
  place.after(aside);
  follow(place, ({ figures, warnings }) => {
    const drawn = figures.filter(isDrawn);
    for (const [name, plot] of plots) {
      if (!drawn.some((data) => data.name === name)) {
        plot.element.remove();
        plots.delete(name);
      }
    }
    drawn.forEach((data, index) => {
      const known = plots.get(data.name);
      const plot = known ?? new Plot(data);
      plots.set(data.name, plot);
      if (place.children[index] !== plot.element) place.insertBefore(plot.element, place.children[index] ?? null);
      if (known) plot.update(data);
      else plot.draw();
    });
    const titles = (some) => some.map((data) => data.title).join(", ");
    const zero = titles(figures.filter((data) => hasValues(data) && !isDrawn(data)));
    const missing = titles(figures.filter((data) => !hasValues(data)));
    aside.textContent = [zero && `0 everywhere: ${zero}.`, missing && `Not measured: ${missing}.`].filter(Boolean).join(" ");
    if (warnings) showWarnings(warnings);
  }, () => {
    if (aside.textContent === READING) aside.textContent = "";
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plots.forEach((plot) => plot.draw()));
}

function showWarnings(warnings) {
  const list = document.getElementById("warnings");
  list?.replaceChildren(...warnings.map((text) => element("li", { className: "bad", textContent: text })));
}

// --- The state of a run ----------------------------------------------------------------------------------------------

function showState(place) {
  const row = ([name, text]) =>
    element("tr", {}, element("th", { textContent: name }), element("td", {}, element("pre", { textContent: text })));
  const table = (facts) =>
    element("div", { className: "scroll" }, element("table", { className: "facts" }, element("tbody", {}, ...facts.map(row))));
  follow(place, ({ facts, more, tables, unreadable }) => {
    const details = element("details", { open: place.querySelector("details")?.open ?? false });
    details.append(element("summary", { textContent: "more of its state, environments and workers" }), table(more));
    details.append(
      element("div", { className: "scroll" }, ...tables.map((text) => element("pre", { className: "wide", textContent: text }))),
    );
    const problems = unreadable.map((text) => element("p", { className: "bad", textContent: text }));
    place.replaceChildren(...problems, table(facts), details);
  });
}

// --- A box for a query -----------------------------------------------------------------------------------------------

function sendByKey(form) {
  form.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
}

// --- A box that checks all boxes of its form -------------------------------------------------------------------------

function checkAll(box) {
  const others = [...box.form.elements].filter((each) => each.name === box.dataset.all);
  box.hidden = false;
  box.addEventListener("change", () => others.forEach((each) => (each.checked = box.checked)));
}

// --- Begin -----------------------------------------------------------------------------------------------------------

document.querySelectorAll("[data-figures]").forEach(showFigures);
document.querySelectorAll("[data-state]").forEach(showState);
document.querySelectorAll("[data-query]").forEach(sendByKey);
document.querySelectorAll("[data-all]").forEach(checkAll);
for (const place of document.querySelectorAll("[data-figure]")) {
  const data = JSON.parse(place.dataset.figure);
  const plot = new Plot(data);
  place.append(plot.element);
  plot.draw();
}

// Formatting of numbers for people.

const NONE = "–";

export function count(value) {
  return value === null || value === undefined ? NONE : Math.round(value).toLocaleString("en");
}

/** Three significant digits. */
export function figure(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return NONE;
  if (value === 0) return "0";
  if (Math.abs(value) >= 100) return count(value);
  return String(Number(value.toPrecision(3)));
}

export function seconds(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return NONE;
  if (value >= 1) return `${figure(value)} s`;
  if (value >= 1e-3 || value === 0) return `${figure(value * 1e3)} ms`;
  return `${figure(value * 1e6)} µs`;
}

export function percent(share) {
  if (share === null || share === undefined || !Number.isFinite(share)) return NONE;
  return `${share >= 0.1 || share === 0 ? Math.round(100 * share) : Number((100 * share).toPrecision(1))} %`;
}

const LARGE = [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];

/** A value with an SI prefix, such as 1.2 GB/s. */
export function sized(value, unit) {
  if (value === null || value === undefined || !Number.isFinite(value)) return NONE;
  const [size, prefix] = LARGE.find(([size]) => value >= size) ?? [1, ""];
  return `${figure(value / size)} ${prefix}${unit}`;
}

export function clock(unixSeconds) {
  return new Date(unixSeconds * 1000).toLocaleTimeString();
}

export function moment(unixSeconds) {
  return new Date(unixSeconds * 1000).toLocaleString();
}

// Readable formats of numbers.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

/** Format a number of bytes, such as "56 KiB". */
export function bytes(number) {
  const power = number < 1 ? 0 : Math.min(UNITS.length - 1, Math.floor(Math.log2(number) / 10));
  return `${short(number / 1024 ** power)} ${UNITS[power]}`;
}

/** Format a number of seconds, such as "4.2 ms", "1.3 s" or "5 min". */
export function seconds(number) {
  if (number < 1) return `${short(number * 1000)} ms`;
  return number < 120 ? `${short(number)} s` : `${Math.round(number / 60)} min`;
}

/** Format a number with about three digits, such as "0.42", "5.8" or "391". */
export function short(number) {
  const digits = number >= 100 || Number.isInteger(number) ? 0 : number >= 10 ? 1 : 2;
  return Number(number.toFixed(digits)).toLocaleString("en");
}

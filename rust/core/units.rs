//! Parses and formats sizes and times.

use std::fmt;

/// Reason why a text is not a valid size.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum SizeError {
    /// The text is not a number with a known unit.
    Malformed,
    /// The size needs more than 64 bits.
    Overflow,
}

impl fmt::Display for SizeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SizeError::Malformed => {
                "must be a number of bytes, optionally with K, M, G or T (or KiB, MiB, GiB, TiB) for multiples of 1024, as in 64M"
            }
            SizeError::Overflow => "must be less than 16 EiB (2^64 bytes)",
        })
    }
}

/// Parses a size such as `4096`, `64M` or `1GiB` and returns the number of bytes. `MB` and similar units are errors, because they can mean
/// 10^6 or 2^20.
pub fn parse_size(text: &str) -> Result<u64, SizeError> {
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (number, unit) = text.split_at(digits);
    let shift = match unit {
        "" | "B" => 0,
        "K" | "k" | "KiB" => 10,
        "M" | "MiB" => 20,
        "G" | "GiB" => 30,
        "T" | "TiB" => 40,
        _ => return Err(SizeError::Malformed),
    };
    if number.is_empty() {
        return Err(SizeError::Malformed);
    }
    number.parse::<u64>().ok().and_then(|n| n.checked_mul(1 << shift)).ok_or(SizeError::Overflow)
}

/// Formats a number of bytes with a binary unit, for example `512.0 MiB`.
pub fn size(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let unit = (bytes.max(1).ilog2() / 10).min(4);
    if unit == 0 { format!("{bytes} B") } else { format!("{:.1} {}", bytes as f64 / 1024_f64.powi(unit as i32), UNITS[unit as usize]) }
}

/// Formats a duration given in seconds, for example `3.72 ms`.
pub fn time(seconds: f64) -> String {
    match seconds {
        s if s < 1e-3 => format!("{:.1} us", s * 1e6),
        s if s < 1.0 => format!("{:.2} ms", s * 1e3),
        s => format!("{s:.2} s"),
    }
}

/// Formats the devices of a machine for messages, with the numbers that callers use: `GPUs 0 to 3, the host and host NUMA domain 1`.
pub fn devices(gpus: u32, hosts: u32) -> String {
    let gpus = match gpus {
        0 => "no GPU".to_owned(),
        1 => "GPU 0".to_owned(),
        _ => format!("GPUs 0 to {}", gpus - 1),
    };
    match hosts {
        0 => format!("{gpus} and no host domain"),
        1 => format!("{gpus} and the host"),
        2 => format!("{gpus}, the host and host NUMA domain 1"),
        _ => format!("{gpus}, the host and host NUMA domains 1 to {}", hosts - 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_named_as_there_are() {
        assert_eq!(devices(4, 8), "GPUs 0 to 3, the host and host NUMA domains 1 to 7");
        assert_eq!(devices(4, 2), "GPUs 0 to 3, the host and host NUMA domain 1");
        assert_eq!(devices(1, 1), "GPU 0 and the host");
        assert_eq!(devices(0, 0), "no GPU and no host domain");
    }

    #[test]
    fn sizes_are_read_as_they_are_written() {
        for (text, bytes) in [("0", 0), ("4096", 4096), ("1K", 1024), ("64M", 64 << 20), ("2GiB", 2 << 30), ("3T", 3 << 40), ("7B", 7)] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
        for text in ["", "M", "1MB", "-1", "1.5G", "1 M", "0x10", "１K"] {
            assert_eq!(parse_size(text), Err(SizeError::Malformed), "{text}");
        }
        for text in ["18446744073709551616", "16777216T"] {
            assert_eq!(parse_size(text), Err(SizeError::Overflow), "{text}");
        }
    }

    #[test]
    fn sizes_and_times_read_well() {
        assert_eq!([size(0), size(1023), size(1 << 20), size(u64::MAX)], ["0 B", "1023 B", "1.0 MiB", "16777216.0 TiB"]);
        assert_eq!([time(6.7e-6), time(3.72e-3), time(2.5)], ["6.7 us", "3.72 ms", "2.50 s"]);
    }
}

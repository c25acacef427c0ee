//! Describes a context as text and as JSON.

use super::config::{BackendChoice, Config, Verify};
use super::lifetime::Context;
use crate::backend::SignalWait;
use crate::plan::{Engine, Relays};
use serde_json::{Value, json};
use std::fmt::Write;

impl Context {
    /// Returns a human-readable description of the backend, the machine and the active settings.
    pub fn describe(&self) -> String {
        let mut text = String::new();
        let machine = self.machine();
        let topology = machine.topology();
        // Writing to a String cannot fail.
        let _ = writeln!(text, "mpgpu {}, {} backend", env!("CARGO_PKG_VERSION"), self.backend().name());
        text += self.backend().nature();
        let _ = writeln!(
            text,
            "topology {} ({} GPUs, {} host domains): {}",
            topology.name,
            machine.gpu_count(),
            machine.host_count(),
            topology.description
        );
        for (name, value) in settings(self.config()) {
            let _ = writeln!(text, "  {name:<14} {}", value.as_str().map_or_else(|| value.to_string(), str::to_owned));
        }
        if let Some(tuning) = self.tuning() {
            let _ = writeln!(text, "tuned values are active: {}", tuning.summary());
        }
        text
    }

    /// Returns a description of the backend, the machine and the active settings as JSON.
    pub fn to_json(&self) -> Value {
        let machine = self.machine();
        json!({
            "version": env!("CARGO_PKG_VERSION"),
            "backend": self.backend().name(),
            "topology": {
                "name": machine.topology().name,
                "description": machine.topology().description,
                "gpus": machine.gpu_count(),
                "host_domains": machine.host_count(),
            },
            "tuning": self.tuning().map(|tuning| json!({ "origin": tuning.origin.name(), "digest": tuning.digest, "classes": tuning.classes.len() })),
            "settings": settings(self.config()).into_iter().map(|(name, value)| (name.to_owned(), value)).collect::<serde_json::Map<_, _>>(),
        })
    }
}

/// Returns the name and the value of each active setting. The value `auto` means that the model chooses.
fn settings(config: &Config) -> [(&'static str, Value); 17] {
    fn or_auto<T: Into<Value>>(value: Option<T>) -> Value {
        value.map_or_else(|| "auto".into(), Into::into)
    }
    let backend = match config.backend {
        BackendChoice::Auto => "auto",
        BackendChoice::Host => "host",
        BackendChoice::Cuda => "cuda",
    };
    let engine = match config.engine {
        Engine::Auto => "auto",
        Engine::Stream => "stream",
        Engine::Graph => "graph",
        Engine::Batch => "batch",
        Engine::Kernel => "kernel",
    };
    let verify = match config.verify {
        Verify::Off => "off",
        Verify::Program => "program",
        Verify::Bytes => "bytes",
    };
    let signal_wait = config.signal_wait.map(|wait| match wait {
        SignalWait::Operation => "operation",
        SignalWait::Kernel => "kernel",
    });
    [
        ("backend", backend.into()),
        ("topology", config.topology.clone().map_or_else(|| "auto".into(), Value::from)),
        ("engine", engine.into()),
        ("max_paths", or_auto(config.max_paths)),
        ("host_path", or_auto(config.host_path.map(|on| if on { "on" } else { "off" }))),
        ("relay_gpus", config.relays.map_or_else(|| "auto".into(), |relays| relays.to_json(Relays::NAMED))),
        ("chunk_bytes", or_auto(config.chunk_bytes)),
        ("relay_chunks", or_auto(config.relay_chunks)),
        ("host_chunks", or_auto(config.host_chunks)),
        ("min_bytes", or_auto(config.min_bytes)),
        ("staging_bytes", config.staging_bytes.into()),
        ("cache_plans", config.cache_plans.into()),
        ("cache_graphs", config.cache_graphs.into()),
        ("host_threads", config.host_threads.into()),
        ("tuning_file", config.tuning_file.as_deref().unwrap_or("none").into()),
        ("verify", verify.into()),
        ("signal_wait", or_auto(signal_wait)),
    ]
}

//! The data plane's log: to standard error, as text or as one JSON object a line, like Python's.

use std::fmt;

use pyo3::prelude::*;
use serde_json::{Map, Value};
use tracing::field::{Field, Visit};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::fmt::format::{Format, Writer};
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt;

use crate::errors::config_error;

/// The target of the lines by which a push can be followed.
const PUSH_TARGET: &str = "backstay_net::push";
/// Of `2026-11-21T12:00:00.123456Z`, what Python's side writes, too.
const TIME_TO_MILLISECONDS: usize = 23;

/// Write the data plane's log lines of this level ("debug", "info", "warning", "error") and
/// above to standard error, in this form ("text" or "json"). The first call of a process decides.
#[pyfunction]
#[pyo3(signature = (level, form="text", node_id="", trace_pushes=false))]
pub(crate) fn log_to_stderr(
    py: Python<'_>,
    level: &str,
    form: &str,
    node_id: &str,
    trace_pushes: bool,
) -> PyResult<()> {
    let level = match level {
        "debug" => LevelFilter::DEBUG,
        "info" => LevelFilter::INFO,
        "warning" => LevelFilter::WARN,
        "error" => LevelFilter::ERROR,
        _ => {
            let what = format!("log_level is {level:?}: no such level");
            return Err(config_error(py, &what));
        }
    };
    let form = match form {
        "text" => Form::Text(Format::default().with_ansi(false)),
        "json" => Form::Json,
        _ => {
            let what = format!("log_format is {form:?}: it must be text or json");
            return Err(config_error(py, &what));
        }
    };
    let mut filter = Targets::new().with_default(level);
    if trace_pushes {
        filter = filter.with_target(PUSH_TARGET, LevelFilter::DEBUG);
    }
    let lines = tracing_subscriber::fmt::layer()
        .with_ansi(false)
        .with_writer(std::io::stderr)
        .event_format(Lines {
            form,
            node_id: node_id.to_owned(),
        });
    // An error means that another call was first.
    let _ = tracing_subscriber::registry()
        .with(filter)
        .with(lines)
        .try_init();
    Ok(())
}

enum Form {
    Text(Format),
    Json,
}

/// Writes events as lines.
struct Lines {
    form: Form,
    node_id: String,
}

impl<S, N> FormatEvent<S, N> for Lines
where
    S: tracing::Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &tracing::Event<'_>,
    ) -> fmt::Result {
        match &self.form {
            Form::Text(format) => format.format_event(context, writer, event),
            Form::Json => writeln!(writer, "{}", self.object(event)?),
        }
    }
}

impl Lines {
    /// An event as the object that Python's side would write.
    fn object(&self, event: &tracing::Event<'_>) -> Result<Value, fmt::Error> {
        let mut time = String::new();
        SystemTime.format_time(&mut Writer::new(&mut time))?;
        time.truncate(TIME_TO_MILLISECONDS);
        time.push_str("+00:00");
        let metadata = event.metadata();
        let level = match *metadata.level() {
            tracing::Level::ERROR => "error",
            tracing::Level::WARN => "warning",
            tracing::Level::INFO => "info",
            _ => "debug",
        };
        let mut members = Members(Map::new());
        for (name, text) in [
            ("time", time.as_str()),
            ("level", level),
            ("logger", metadata.target()),
            ("node", &self.node_id),
        ] {
            members.0.insert(name.to_owned(), text.into());
        }
        event.record(&mut members);
        Ok(Value::Object(members.0))
    }
}

/// Collects an event's fields.
struct Members(Map<String, Value>);

impl Members {
    fn add(&mut self, field: &Field, value: Value) {
        // The line names its writer above, so a field `node` is about another node.
        let name = match field.name() {
            "node" => "peer",
            name => name,
        };
        self.0.insert(name.to_owned(), value);
    }
}

impl Visit for Members {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.add(field, format!("{value:?}").into());
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.add(field, value.into());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.add(field, value.into());
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.add(field, value.into());
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.add(field, value.into());
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.add(field, value.into());
    }
}

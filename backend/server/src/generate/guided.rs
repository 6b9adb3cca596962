//! Grammars of requests: compiled off the threads that serve streams, within a time, once for all that have the same text.

use std::sync::Arc;
use std::time::Duration;

use drafthorse_control::Grammar;
use drafthorse_worker::grammar::Compiled;
use tokio::time::timeout;

use super::model::ServedModel;
use crate::error::{Result, ServerError};
use crate::params::Guided;

/// How long a request waits for its grammar. What takes longer goes on until one of its own bounds ends it, and counts among
/// those that are compiled at once.
const MAX_COMPILE_TIME: Duration = Duration::from_secs(10);

impl ServedModel {
    /// The grammar compiled. Held until the answer ends, so that the rank finds it and need not compile it in a step.
    ///
    /// # Errors
    /// `BadInput` naming the field, with what is wrong with it and where; `Unsupported` if the model's tokens make no grammars.
    pub(super) async fn compile(&self, guided: &Guided) -> Result<Arc<Compiled>> {
        let Some(grammars) = self.grammars() else {
            return Err(ServerError::unsupported(format!("{} with this model's tokenizer", guided.field)));
        };
        if let Some(known) = grammars.known(&guided.grammar) {
            return Ok(known);
        }
        let compile = async {
            let turn = Arc::clone(&self.compiling).acquire_owned().await.map_err(ServerError::internal)?;
            let (grammars, guided) = (Arc::clone(grammars), guided.clone());
            let compiling = tokio::task::spawn_blocking(move || {
                let _turn = turn;
                let compile = |field: &str, grammar: &Grammar| {
                    grammars.compile(grammar).map_err(|error| ServerError::bad_input(field, error.to_string()))
                };
                for (field, part) in &guided.parts {
                    compile(field, part)?;
                }
                compile(&guided.field, &guided.grammar)
            });
            compiling.await.map_err(ServerError::internal)?
        };
        let late = |_| {
            let reason = format!("was not compiled within {} s", MAX_COMPILE_TIME.as_secs());
            ServerError::bad_input(&guided.field, reason)
        };
        timeout(MAX_COMPILE_TIME, compile).await.map_err(late)?
    }
}

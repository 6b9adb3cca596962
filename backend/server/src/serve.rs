//! The process: listens, loads, answers, and drains when it is told to stop.

use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic::transport::server::TcpIncoming;
use tracing::{debug, info, warn};

use crate::app::App;
use crate::config::ServerConfig;
use crate::error::{Result, ServerError};
use crate::repository::Repository;
use crate::{http, metrics, service};

/// Time that a client has for the headers of a request, and that a connection may be idle.
const HEADER_TIME: Duration = Duration::from_secs(60);

/// Time that connections get to close after the last request in flight has ended.
const CLOSE_TIME: Duration = Duration::from_secs(1);

/// A server that listens. Dropping it leaves it running; [`shutdown`](Self::shutdown) ends it.
pub struct Server {
    pub app: Arc<App>,
    /// Where it listens, with ports that were 0 filled in; `None` for what is not allowed.
    pub http: Option<SocketAddr>,
    pub grpc: Option<SocketAddr>,
    pub metrics: Option<SocketAddr>,
    /// HTTP and gRPC, in this order.
    servers: Vec<(&'static str, JoinHandle<Result<()>>)>,
    metrics_server: Option<JoinHandle<Result<()>>>,
    stop_metrics: CancellationToken,
    loading: JoinHandle<Vec<String>>,
}

impl Server {
    /// Listens on all ports and begins to load; answers before anything is loaded, live but not ready.
    ///
    /// # Errors
    /// If the repository cannot be read, or a port cannot be had.
    pub async fn start(config: ServerConfig) -> Result<Self> {
        let config = Arc::new(config);
        let [http_address, grpc_address, metrics_address] = config.addresses();
        // All ports or none, and before anything else: a server that half listens confuses whoever watches it.
        let http_listener = bind(http_address).await?;
        let grpc_listener = bind(grpc_address).await?;
        let metrics_listener = bind(metrics_address).await?;
        let repository = Repository::open(config.clone())?;
        let app = Arc::new(App::new(config, repository));
        let address = |listener: &Option<TcpListener>| listener.as_ref().and_then(|bound| bound.local_addr().ok());
        let (http, grpc, metrics) = (address(&http_listener), address(&grpc_listener), address(&metrics_listener));

        let mut servers = Vec::new();
        let closing = app.closing();
        if let Some(listener) = http_listener {
            servers.push(("HTTP", tokio::spawn(serve_http(listener, http::router(&app), closing.clone()))));
        }
        if let Some(listener) = grpc_listener {
            servers.push(("gRPC", tokio::spawn(serve_grpc(listener, app.clone())?)));
        }
        let stop_metrics = CancellationToken::new();
        let metrics_server = metrics_listener.map(|listener| {
            let page_app = app.clone();
            let router = metrics::router(move || metrics_page(&page_app));
            tokio::spawn(serve_http(listener, router, stop_metrics.clone()))
        });
        let loading_repository = app.repository.clone();
        let loading = tokio::spawn(async move { loading_repository.load_at_start().await });
        Ok(Server { app, http, grpc, metrics, servers, metrics_server, stop_metrics, loading })
    }

    /// Waits for the models that are loaded at start. Returns the names of those that failed.
    pub async fn loaded(&mut self) -> Vec<String> {
        (&mut self.loading).await.unwrap_or_default()
    }

    /// Takes no new requests, gives those in flight until the exit timeout, and ends. True if all had ended by themselves.
    pub async fn shutdown(self) -> bool {
        let timeout = Duration::from_secs(self.app.config.exit_timeout_secs);
        self.app.begin_exit();
        self.loading.abort();
        let in_flight = self.app.num_in_flight();
        if in_flight > 0 {
            info!(in_flight, timeout_seconds = timeout.as_secs(), "waiting for requests in flight");
        }
        let drained = tokio::time::timeout(timeout, self.app.drained()).await.is_ok();
        if !drained {
            warn!(in_flight = self.app.num_in_flight(), "the exit timeout is over, requests in flight are ended");
            // Which tells each of them why.
            self.app.repository.serving().iter().for_each(|model| model.served.engine().stop());
            let _ = tokio::time::timeout(CLOSE_TIME, self.app.drained()).await;
        }
        self.app.close();
        // Responses are written by now or never; what still holds a connection open is a client that keeps it.
        let closed = async {
            for (what, server) in self.servers {
                report(what, server.await);
            }
        };
        let _ = tokio::time::timeout(CLOSE_TIME, closed).await;
        self.stop_metrics.cancel();
        if let Some(server) = self.metrics_server {
            let _ = tokio::time::timeout(CLOSE_TIME, server).await;
        }
        drained
    }
}

async fn bind(address: Option<SocketAddr>) -> Result<Option<TcpListener>> {
    let Some(address) = address else { return Ok(None) };
    TcpListener::bind(address).await.map(Some).map_err(|source| ServerError::Bind { address, source })
}

/// Answers until `stop`, then ends connections as their requests end.
async fn serve_http(listener: TcpListener, router: axum::Router, stop: CancellationToken) -> Result<()> {
    let mut builder = auto::Builder::new(TokioExecutor::new());
    // A client that opens connections and says nothing must not keep them.
    builder.http1().timer(TokioTimer::new()).header_read_timeout(HEADER_TIME);
    builder.http2().timer(TokioTimer::new()).keep_alive_interval(HEADER_TIME);
    let connections = GracefulShutdown::new();
    loop {
        let accepted = tokio::select! {
            () = stop.cancelled() => break,
            accepted = listener.accept() => accepted,
        };
        let Ok((stream, _)) = accepted else {
            // Out of files, mostly: some will be closed.
            tokio::time::sleep(Duration::from_millis(100)).await;
            continue;
        };
        // Without it small events wait for each other; a socket that refuses is closed already.
        let _ = stream.set_nodelay(true);
        let service = TowerToHyperService::new(router.clone());
        let connection = builder.serve_connection_with_upgrades(TokioIo::new(stream), service).into_owned();
        let connection = connections.watch(connection);
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                debug!(%error, "a connection broke");
            }
        });
    }
    drop(listener);
    connections.shutdown().await;
    Ok(())
}

fn serve_grpc(listener: TcpListener, app: Arc<App>) -> Result<impl Future<Output = Result<()>> + Send> {
    let health = tonic_health::server::HealthReporter::new();
    let routes = service::routes(&app, health.clone())?;
    let keepalive_time = Duration::from_millis(app.config.grpc_keepalive_time);
    let keepalive_timeout = Duration::from_millis(app.config.grpc_keepalive_timeout);
    Ok(async move {
        service::health::begin(&app, &health).await;
        tokio::spawn(service::health::follow(app.clone(), health));
        let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
        tonic::transport::Server::builder()
            .http2_keepalive_interval(Some(keepalive_time))
            .http2_keepalive_timeout(Some(keepalive_timeout))
            .add_routes(routes)
            .serve_with_incoming_shutdown(incoming, app.closing().clone().cancelled_owned())
            .await
            .map_err(|error| ServerError::Serve { what: "gRPC", reason: error.to_string() })
    })
}

fn metrics_page(app: &App) -> String {
    let models = app.repository.serving();
    let versions: Vec<String> = models.iter().map(|model| model.version.to_string()).collect();
    let views: Vec<_> = models.iter().zip(&versions).map(|(model, version)| model.served.view(version)).collect();
    metrics::write_page(&views)
}

fn report(what: &'static str, ended: Result<Result<()>, tokio::task::JoinError>) {
    match ended {
        Ok(Ok(())) => {}
        Ok(Err(error)) => warn!(what, %error, "a server ended with an error"),
        Err(error) => warn!(what, %error, "a server was ended"),
    }
}

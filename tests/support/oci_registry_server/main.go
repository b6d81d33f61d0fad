// Command oci_registry_server serves the container registry of go-containerregistry on a free port, in memory.
//
// It prints the port to standard output and serves until standard input ends. REGISTRY_HOST in its environment is the
// address to listen on, 127.0.0.1 if it is empty. With REGISTRY_USERNAME and REGISTRY_PASSWORD it requires them (HTTP
// Basic).
package main

import (
	"crypto/subtle"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"time"

	"github.com/google/go-containerregistry/pkg/registry"
)

func main() {
	host := os.Getenv("REGISTRY_HOST")
	if host == "" {
		host = "127.0.0.1"
	}
	listener, err := net.Listen("tcp", net.JoinHostPort(host, "0"))
	if err != nil {
		log.Fatal(err)
	}
	handler := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	if username := os.Getenv("REGISTRY_USERNAME"); username != "" {
		handler = requireLogin(handler, username, os.Getenv("REGISTRY_PASSWORD"))
	}
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(0)
	}()
	fmt.Println(listener.Addr().(*net.TCPAddr).Port)
	server := &http.Server{Handler: handler, ReadHeaderTimeout: 10 * time.Second}
	log.Fatal(server.Serve(listener))
}

func requireLogin(next http.Handler, username, password string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		u, p, _ := r.BasicAuth()
		if subtle.ConstantTimeCompare([]byte(u), []byte(username))&subtle.ConstantTimeCompare([]byte(p), []byte(password)) != 1 {
			w.Header().Set("WWW-Authenticate", `Basic realm="test"`)
			http.Error(w, `{"errors":[{"code":"UNAUTHORIZED","message":"login required"}]}`, http.StatusUnauthorized)
			return
		}
		next.ServeHTTP(w, r)
	})
}

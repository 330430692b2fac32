package main

import (
	"context"
	"fmt"
	"runtime"
	"runtime/debug"
	"strings"
)

// environment says what was measured on what.
func (b *bench) environment(ctx context.Context) (string, error) {
	settings := []string{"server_version", "fsync", "synchronous_commit", "shared_buffers", "max_wal_size"}
	values := make([]string, len(settings))
	for i, setting := range settings {
		if err := b.admin.QueryRowContext(ctx, `SELECT current_setting($1)`, setting).Scan(&values[i]); err != nil {
			return "", err
		}
		if i > 0 {
			values[i] = setting + " " + values[i]
		}
	}
	postgreSQL := fmt.Sprintf("PostgreSQL %s (%s)", values[0], strings.Join(values[1:], ", "))

	drivers := []string{}
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, dependency := range info.Deps {
			switch dependency.Path {
			case "github.com/lib/pq", "github.com/jackc/pgx/v5", "github.com/ThreeDotsLabs/watermill", "github.com/ThreeDotsLabs/watermill-amqp/v2":
				drivers = append(drivers, strings.TrimPrefix(dependency.Path, "github.com/")+" "+dependency.Version)
			}
		}
	}
	return fmt.Sprintf("%s\nRabbitMQ %s, %s, %s, %d cores for clients and servers\n%d rounds; %s a variant, %d times a round where the bars below judge it",
		postgreSQL, b.broker.version(), strings.Join(append([]string{runtime.Version()}, drivers...), ", "),
		runtime.GOOS+"/"+runtime.GOARCH, runtime.NumCPU(), b.options.rounds, b.options.slice, judgedTimes), nil
}

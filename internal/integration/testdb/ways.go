package testdb

import (
	"context"
	"database/sql"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	inbox "github.com/devmappa/watermill-inbox"
	inboxpgx "github.com/devmappa/watermill-inbox/pgx"
	inboxsql "github.com/devmappa/watermill-inbox/sql"
)

// Ways are the ways to use PostgreSQL: three drivers of database/sql, and a pgxpool.
var Ways = []string{"postgres", "fused", "pgx", "inboxpgx"}

// Repository is what all repositories on PostgreSQL are.
type Repository interface {
	inbox.Repository
	inbox.Records
	Check(context.Context) error
	InitializeSchema(context.Context) error
}

// Way is a repository on a pool of its own.
type Way struct {
	Repository

	// Exec runs a statement in the transaction of the handler's context.
	Exec func(ctx context.Context, statement string, args ...any) error
}

// Way opens a pool of so many connections at the address, and a repository on it that has made no schema.
func (d *Database) Way(t testing.TB, way, address string, connections int) Way {
	t.Helper()
	if way == "inboxpgx" {
		config, err := pgxpool.ParseConfig(address)
		if err != nil {
			t.Fatal(err)
		}
		config.MaxConns = int32(connections)
		pool, err := pgxpool.NewWithConfig(context.Background(), config)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(pool.Close)
		repository, err := inboxpgx.NewRepository(pool, inboxpgx.Options{})
		if err != nil {
			t.Fatal(err)
		}
		return Way{repository, func(ctx context.Context, statement string, args ...any) error {
			tx, _ := inboxpgx.TxFromContext(ctx)
			_, err := tx.Exec(ctx, statement, args...)
			return err
		}}
	}
	on := &Database{Driver: way, URL: address, Adapter: inboxsql.DefaultPostgreSQLSchema{}}
	if way == "fused" {
		on.Driver, on.Fused = "postgres", true
	}
	on.DB = on.Open(t)
	on.SetMaxOpenConns(connections)
	return Way{on.RepositoryWithoutSchema(t, inboxsql.Options{}), func(ctx context.Context, statement string, args ...any) error {
		return handlerTx(ctx, func(tx *sql.Tx) error {
			_, err := tx.ExecContext(ctx, statement, args...)
			return err
		})
	}}
}

//go:build unix

package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/lib/pq"
	_ "modernc.org/sqlite" // driver "sqlite"

	inbox "github.com/devmappa/watermill-inbox"
	inboxpgx "github.com/devmappa/watermill-inbox/pgx"
	inboxsql "github.com/devmappa/watermill-inbox/sql"
	inboxpq "github.com/devmappa/watermill-inbox/sql/pq"
)

// store is the database as a worker uses it. The handler's statements go through the transaction in the
// context.
type store interface {
	repository() inbox.RelayRepository
	write(ctx context.Context, statement string, args ...any) error
	read(ctx context.Context, query string) error
	close()
}

// stores are the ways to a database, by its kind.
var stores = map[string][]string{
	"postgresql": {"lib/pq", "fused", "pgx"},
	"sqlite":     {"sqlite"},
}

func openStore(ctx context.Context, name, dsn string, connections int) (store, error) {
	if name == "pgx" {
		return openPGX(ctx, dsn, connections)
	}
	db, adapter, err := openSQL(name, dsn)
	if err != nil {
		return nil, err
	}
	db.SetMaxOpenConns(connections)
	db.SetMaxIdleConns(connections)
	repository, err := inboxsql.NewRepository(db, inboxsql.Options{SchemaAdapter: adapter})
	return &sqlStore{db: db, inbox: repository}, err
}

func openSQL(name, dsn string) (*sql.DB, inboxsql.SchemaAdapter, error) {
	switch name {
	case "sqlite":
		db, err := sql.Open("sqlite", dsn)
		return db, inboxsql.DefaultSQLiteSchema{}, err
	case "lib/pq":
		db, err := sql.Open("postgres", dsn)
		return db, inboxsql.DefaultPostgreSQLSchema{}, err
	case "fused":
		connector, err := pq.NewConnector(dsn)
		if err != nil {
			return nil, nil, err
		}
		fused, err := inboxpq.NewConnector(connector)
		if err != nil {
			return nil, nil, err
		}
		return sql.OpenDB(fused), inboxsql.DefaultPostgreSQLSchema{}, nil
	}
	return nil, nil, fmt.Errorf("there is no store %q", name)
}

var errNoTransaction = errors.New("no transaction in the context")

type sqlStore struct {
	db    *sql.DB
	inbox *inboxsql.Repository
}

func (s *sqlStore) repository() inbox.RelayRepository { return s.inbox }

func (s *sqlStore) close() { _ = s.db.Close() }

func (s *sqlStore) write(ctx context.Context, statement string, args ...any) error {
	tx, ok := inboxsql.TxFromContext(ctx)
	if !ok {
		return errNoTransaction
	}
	_, err := tx.ExecContext(ctx, statement, args...)
	return err
}

func (s *sqlStore) read(ctx context.Context, query string) error {
	tx, ok := inboxsql.TxFromContext(ctx)
	if !ok {
		return errNoTransaction
	}
	rows, err := tx.QueryContext(ctx, query)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
	}
	return rows.Err()
}

type pgxStore struct {
	pool  *pgxpool.Pool
	inbox *inboxpgx.Repository
}

func openPGX(ctx context.Context, dsn string, connections int) (store, error) {
	config, err := pgxpool.ParseConfig(dsn)
	if err != nil {
		return nil, err
	}
	config.MaxConns = int32(connections)
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return nil, err
	}
	repository, err := inboxpgx.NewRepository(pool, inboxpgx.Options{})
	return &pgxStore{pool: pool, inbox: repository}, err
}

func (s *pgxStore) repository() inbox.RelayRepository { return s.inbox }

func (s *pgxStore) close() { s.pool.Close() }

func (s *pgxStore) write(ctx context.Context, statement string, args ...any) error {
	tx, ok := inboxpgx.TxFromContext(ctx)
	if !ok {
		return errNoTransaction
	}
	_, err := tx.Exec(ctx, statement, args...)
	return err
}

func (s *pgxStore) read(ctx context.Context, query string) error {
	tx, ok := inboxpgx.TxFromContext(ctx)
	if !ok {
		return errNoTransaction
	}
	rows, err := tx.Query(ctx, query)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
	}
	return rows.Err()
}

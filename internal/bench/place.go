package main

import (
	"context"
	"database/sql"
	"fmt"
	"net/url"
	"sync/atomic"

	"github.com/ThreeDotsLabs/watermill"

	inboxsql "github.com/devmappa/watermill-inbox/sql"
)

// accounts is how many rows the effects are spread over, so that workers do not wait for each other's.
const accounts = 1000

// place is a schema on the server with accounts and an inbox, and what must be in them at the end. Each
// variant has its own, so that it can be checked.
type place struct {
	name      string
	schema    string
	url       string       // the schema is the search path
	claims    bool         // each message leaves a record
	prefilled atomic.Int64 // records of others, as far as they must still be there
	processed atomic.Int64 // messages, each once
}

func newPlace(ctx context.Context, admin *sql.DB, name, address string, claims bool) (*place, error) {
	p := &place{name: name, schema: "bench_" + watermill.NewShortUUID(), claims: claims}
	parsed, err := url.Parse(address)
	if err != nil {
		return nil, err
	}
	query := parsed.Query()
	query.Set("search_path", `"`+p.schema+`"`)
	parsed.RawQuery = query.Encode()
	p.url = parsed.String()

	if _, err := admin.ExecContext(ctx, `CREATE SCHEMA "`+p.schema+`"`); err != nil {
		return nil, err
	}
	return p, p.initialize(ctx)
}

func (p *place) initialize(ctx context.Context) error {
	db, err := sql.Open("postgres", p.url)
	if err != nil {
		return err
	}
	defer db.Close()
	repository, err := inboxsql.NewRepository(db, inboxsql.Options{SchemaAdapter: inboxsql.DefaultPostgreSQLSchema{}})
	if err != nil {
		return err
	}
	if err := repository.InitializeSchema(ctx); err != nil {
		return err
	}
	_, err = db.ExecContext(ctx, fmt.Sprintf(`
		CREATE TABLE accounts (id int PRIMARY KEY, balance bigint NOT NULL DEFAULT 0);
		INSERT INTO accounts (id) SELECT generate_series(1, %d)`, accounts))
	return err
}

// verify compares what is in the tables with what was counted on this side.
func (p *place) verify(ctx context.Context, admin *sql.DB) error {
	var effects, records int64
	err := admin.QueryRowContext(ctx, fmt.Sprintf(
		`SELECT (SELECT sum(balance) FROM %[1]q.accounts), (SELECT count(*) FROM %[1]q.watermill_inbox WHERE consumer <> '%[2]s')`, p.schema, expiredConsumer)).Scan(&effects, &records)
	if err != nil {
		return err
	}
	processed, claimed := p.processed.Load(), p.prefilled.Load()
	if p.claims {
		claimed += processed
	}
	if effects != processed || records != claimed {
		return fmt.Errorf("%d messages processed, but %d effects; %d records expected, but %d are there", processed, effects, claimed, records)
	}
	return nil
}

func (p *place) drop(ctx context.Context, admin *sql.DB) error {
	_, err := admin.ExecContext(ctx, `DROP SCHEMA "`+p.schema+`" CASCADE`)
	return err
}

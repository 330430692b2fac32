package partitions_test

import (
	"context"
	"database/sql"
	"log"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	_ "github.com/lib/pq"

	inbox "github.com/devmappa/watermill-inbox"
	"github.com/devmappa/watermill-inbox/partitions"
	inboxsql "github.com/devmappa/watermill-inbox/sql"
)

// An inbox partitioned by UUIDv7s, in which a month's records are kept and old ones cost nothing to delete.
func ExamplePartitions() {
	var logger watermill.LoggerAdapter = watermill.NopLogger{}
	db, err := sql.Open("postgres", "postgres://localhost/shop")
	if err != nil {
		log.Fatal(err)
	}
	keeper, err := partitions.New(db, partitions.Options{
		IDs: inbox.UUIDv7, Retention: 30 * 24 * time.Hour, Logger: logger,
	})
	if err != nil {
		log.Fatal(err)
	}
	if _, err := keeper.Pass(context.Background()); err != nil { // makes the table and the first partitions
		log.Fatal(err)
	}
	go keeper.Run(context.Background())

	repository, err := inboxsql.NewRepository(db, inboxsql.Options{
		SchemaAdapter: inboxsql.PartitionedPostgreSQLSchema{IDs: inbox.UUIDv7},
	})
	if err != nil {
		log.Fatal(err)
	}
	once, err := inbox.NewMiddleware(repository, inbox.Options{Logger: logger})
	if err != nil {
		log.Fatal(err)
	}
	_ = once
}

// A plain table becomes a partitioned one while services claim in it. Afterwards they are rolled over to
// PartitionedPostgreSQLSchema, and Partitions runs.
func ExamplePartitions_Convert() {
	var keeper *partitions.Partitions
	ctx, cancel := context.WithTimeout(context.Background(), time.Hour)
	defer cancel()
	if err := keeper.Convert(ctx); err != nil {
		log.Fatal(err) // the plain table is as it was; or, when the hour is over, call it again
	}
}

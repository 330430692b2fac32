package model_test

import (
	"testing"

	"github.com/devmappa/watermill-inbox/internal/model"
)

func TestTheDesignKeepsItsPromise(t *testing.T) {
	t.Parallel()
	report := model.Explore(model.Design{}, model.Start(3, 2, 3)) // any combination of eight accidents
	t.Logf("%d states, %d of them final; steps taken: %v", report.States, report.Final, report.Taken)
	for property, way := range report.Broken {
		t.Errorf("not so: %s\n%s", property, way)
	}
	if report.Stuck != "" {
		t.Errorf("nothing more can happen after\n%s", report.Stuck)
	}
	// An exploration that sees little finds nothing.
	if report.States < 50_000 || report.Final < 1_000 {
		t.Errorf("%d states, %d of them final are too few", report.States, report.Final)
	}
	for _, step := range []string{"deliver", "claim", "handle", "store", "commit", "publish", "ack", "mark",
		"crash", "disconnect", "duplicate", "rollBackOrphan"} {
		if report.Taken[step] == 0 {
			t.Errorf("the step %q was never taken", step)
		}
	}
}

// Each thing that the design does is needed: without it, something that was promised is broken. The log (-v)
// tells how.
func TestEveryChangeOfTheDesignIsConvicted(t *testing.T) {
	t.Parallel()
	convicting := map[string]bool{}
	for _, c := range []struct {
		change string
		design model.Design
		broken []model.Property
	}{
		{"the claim is committed before the effect", model.Design{ClaimFirst: true}, []model.Property{model.EffectOnce, model.ClaimIffEffect}},
		{"the claim is committed after the effect", model.Design{ClaimLast: true}, []model.Property{model.EffectOnce}},
		{"look up, then insert, without a unique key", model.Design{CheckThenInsert: true}, []model.Property{model.EffectOnce, model.OneUUID}},
		{"a waiting copy is acknowledged as a duplicate", model.Design{AckWaitingCopy: true}, []model.Property{model.AckedAfterCommit, model.EffectOnce}},
		{"the produced message is not stored", model.Design{NothingStored: true}, []model.Property{model.MessagePublished}},
		{"the produced message is marked as sent at the commit", model.Design{MarkAtCommit: true}, []model.Property{model.MessagePublished}},
		{"a stored message gets a new UUID", model.Design{NewUUIDOnReplay: true}, []model.Property{model.OneUUID}},
		{"the message is acknowledged before the commit", model.Design{AckBeforeCommit: true}, []model.Property{model.AckedAfterCommit, model.EffectOnce}},
		{"the commit forgets the claim", model.Design{ClaimIsForgotten: true}, []model.Property{model.ClaimIffEffect}},
	} {
		report := model.Explore(c.design, model.Start(1, 1, 1))
		t.Logf("%s: %d states", c.change, report.States)
		for _, property := range c.broken {
			convicting[property.Name] = true
			way := report.Broken[property.Name]
			if way == "" {
				t.Errorf("%s, and yet %s", c.change, property.Name)
				continue
			}
			t.Logf("%s. Not so any more: %s.\n%s", c.change, property.Name, way)
		}
	}
	for _, property := range model.Properties {
		if !convicting[property.Name] {
			t.Errorf("no change breaks this property: %s", property.Name)
		}
	}
}
